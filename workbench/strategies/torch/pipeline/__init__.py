"""Helpers of `model_split`: cutting a model into stages, running and timing them.

In reading order:

    trace     how does any module become a chain of pieces
    measure   which layers has a model, and what does each cost
    cut       which worker gets which layers
    program   what do the stages compute together
    stage     how does one stage compute and wait, and how is it timed
    pipeline  how is a worker's share built, and run through the schedule
"""
