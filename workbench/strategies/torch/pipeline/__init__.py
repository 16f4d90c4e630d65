"""Helpers of `model_split`: they cut a model into stages, and run and time the stages.

In reading order:

    trace     any module as a chain of pieces
    measure   the layers of a model, and the cost of each layer
    cut       which worker gets which layers
    program   the computation of all stages together
    stage     the computation, the waits and the timing of one stage
    pipeline  builds a worker's share, and runs it through the schedule
"""
