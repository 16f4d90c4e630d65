"""Helpers of `model_split`: cutting a model into stages, running and timing them.

In reading order:

    trace     how does any module become a chain of pieces
    measure   what does each layer cost
    cut       which worker gets which layers
    program   what do the stages compute together
    stage     how does one stage compute, wait and get timed
    pipeline  how does a batch run through the schedule
    update    how is a model updated that no worker holds whole
"""
