"""A run from its request to its end: requests to engines, their answers, the outcome.

In reading order:

    run         one execution of a plan: its state, its history, its methods
    requests    can the request be met, and what does each engine receive
    allocator   which engines and devices does a run get
    launch      how does a run begin, begin again, and end
    task        one cell on several engines: what came back, and when is it over
    stop        how do workers stop after the same step, and what if one does not
    paused      a rank waits for its user: which rank asks, where does the prompt open
    outcome     which rank's error is the cause, and what do messages say about the others
    registry    which runs and clusters exist in this process
    logging_to  how does a run's data reach TensorBoard and MLflow
    sinks/      the targets of these logs
    workers/    which workers take part, when does that change, which worker waits for which
"""
