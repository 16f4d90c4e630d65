"""How long a run would take with other workers, links or options: predicted from short runs.

All functions are pure: from rows of finished runs they compute seconds per step with an interval. A
run is simulated step by step. Each worker's computation is drawn from the measurements, and the
time of a message is computed from its size and its link. The messages in the catalog decide which
worker has to wait for which.

    link      a link's bandwidth and latency, written as text
    probe     the data of a short run: computation, time for messages, bytes
    work      computation of any number of workers, drawn from measured workers
    exchange  the cost of a step's messages, worker by worker
    pipeline  a step of a pipeline, by its schedule
    fit       seconds per message and per byte, from short runs
    model     one strategy, computed so many times
    predict   the checked arguments and the result
    variants  what-if: changes to a run, and the best of several
    choose    which strategy trains fastest, from a few short runs
"""
