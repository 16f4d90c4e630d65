"""What a run can tell a class.

In reading order:

    diagram  who sends what to whom in a step
    blame    who waited for whom, and what if one had been faster
"""
