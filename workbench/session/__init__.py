"""One cluster, and everything that its user can do with it.

In reading order:

    cluster      `wb.Cluster`: engines, the runs on them, cells without a strategy
    access       which parts of a cluster do the modules below use
    queue_state  which plans wait, which one runs, how much time remains
    queue        how are plans run one after the other
    status       what is each engine doing, how big is it
    logs         what did an engine log, where is each of its threads
    debug        how does the user inspect a rank: paused, failed, or from VS Code
    checkpoints  which checkpoints exist, and which runs own them
    keeping      what does the cluster's folder record about the cluster
    attach       how does another notebook take over a kept cluster
"""
