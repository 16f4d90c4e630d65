"""How a flag of a run is said, and how it has several values.

In reading order:

    flag      a flag: its names, what follows it, what is made of that
    several   several values of one flag, for a run each
    settings  what a line, its plan and the engines all know
"""
