"""What a run can tell a class.

In reading order:

    diagram     who sends what to whom in a step, in general and as a run measured it
    blame       who waited for whom, and what if one had been faster
    prediction  what would other workers, links or options make of it
"""
