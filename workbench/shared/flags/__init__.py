"""How a flag of a run is written, and how it can have several values.

In reading order:

    flag      a flag: its names, its value, and how the value is read
    several   several values of one flag, for a run each
    settings  the settings that a line, its plan and the engines share
"""
