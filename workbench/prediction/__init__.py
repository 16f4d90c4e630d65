"""How long a run would take with other workers, links or options: predicted from short runs.

Pure: rows of finished runs go in, and seconds per step with an interval come out. A run is
simulated step by step. Each worker's computation is drawn from the measurements, and messages take
the time that follows from their size and their link. The messages in the catalog decide which
worker has to wait for which.

    link      what a link carries, as people write it
    probe     what a short run tells: own work, time for messages, bytes
    work      own work of any number of workers, drawn from what was seen
    exchange  what a step's messages cost, worker by worker
    pipeline  a step of a pipeline, by its schedule
    fit       seconds per message and per byte, from short runs
    model     what is to be computed: one strategy, computed so many times
    predict   what is asked for, checked, and what comes back
    variants  what if: changes to a run, and which of several is best
    choose    which strategy trains fastest, from one or two short runs
"""
