"""`model.fit` under a strategy, unchanged for the user.

In reading order:

    fit          how does `model.fit` report to the run
    batches      how is each batch cut, and what is wrong with the data
    coordinated  how do `fit`, `evaluate` and `predict` run under a coordinator
    patches      what of Keras is repaired during a run
"""
