"""Keras' models under a strategy: `model.fit`, unchanged for the user, and `wb.fit`.

In reading order:

    replicated   what is common to all strategies of tf.distribute
    fit          how does `model.fit` report to the run
    batches      how is each batch cut, and what is wrong with the data
    coordinated  how do `fit`, `evaluate` and `predict` run under a coordinator
    patches      which parts of Keras are repaired during a run
"""
