"""Runs over the numbers of workers.

In reading order:

    published  what others have published, with its sources
    axes       the axis of workers; colours and lines
    beside     one's own efficiency beside published curves
    table      a row per plan and number of workers
    picture    speed-up, efficiency, where a step's time goes, what it costs
    exports    how do they look for other tools
"""
