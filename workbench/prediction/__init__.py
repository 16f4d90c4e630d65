"""What a run would take with other workers, links or options: predicted from short runs.

Pure: rows of finished runs go in, seconds of a step with an interval come out. A run is computed
anew, step by step: each worker's own work is drawn from what was seen, messages take the time that
their size and their link cost, and who has to wait for whom follows from the messages that the
catalog describes.

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
