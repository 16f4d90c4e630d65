"""Runs over the numbers of workers.

In reading order:

    published  published curves of others, with their sources
    axes       the axis of workers; colours and lines
    beside     the user's efficiency next to published curves
    table      a row per plan and number of workers
    picture    speed-up, efficiency, the parts of a step's time, and the cost
    exports    text for other tools
"""
