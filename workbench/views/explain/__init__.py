"""Explanations of a run for a class.

In reading order:

    diagram     the messages of a step, in general and as a run measured them
    blame       which worker waited for which, and the run without the slow worker
    prediction  the run with other numbers of workers, links or options
"""
