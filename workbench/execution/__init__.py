"""A run from its request to its end: requests to engines, their answers, the outcome.

In reading order:

    run         one execution of a plan: what is its state, its history, and what can be asked of it
    requests    is what is asked for possible, and what is each engine told
    allocator   which engines and devices does a run get
    launch      how is it begun, begun again, settled
    task        one cell on several engines: what came back, and when is it over
    stop        how do workers stop after the same step, and what if one does not
    paused      a rank waits for its user: who asks, where does the prompt open
    outcome     which rank's error is the reason, and what is said of the others
    registry    which runs and clusters does this process know
    logging_to  how is a run followed for TensorBoard and MLflow
    sinks/      where is it written to
    workers/    who takes part, when does that change, who waits for whom
"""
