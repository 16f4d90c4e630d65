"""One cluster and all that can be asked of it.

In reading order:

    cluster      `wb.Cluster`: engines, the runs on them, cells without a strategy
    access       what do the parts below see of a cluster
    queue_state  which plans wait, which runs, for how long yet
    queue        how are plans run one after the other
    status       what is each engine doing, how big is it
    logs         what did an engine log, where is each of its threads
    debug        how is a rank looked into: paused, failed, or from VS Code
    checkpoints  which checkpoints are there, and whose
    keeping      what does a cluster's folder say about it
    attach       how does another notebook take over a kept cluster
"""
