"""Data that the notebook's side and the engines' side share: no framework, no notebook.

In reading order:

    magic_args   what are the lines of all magics made of, and what does `%cluster` ask for
    flags/       how is a flag written, and how are several values
    run_request  what can a run request: a field per flag, and the parser built from them
    faults       what can be injected
    log_targets  where can `--log` write to
    plan         the checked description of a run, and how it becomes a cell again
    members      who takes part in a run
    cluster_env  which cluster does a process belong to, and what do imports depend on
    messages     which messages do kernel and engines exchange
    protocol     how are these messages sent, signed and valid only once
    events       what happens in a run, which states follow, and the timing of a Stop
    record       how is a step measured, and what is derived from it
    checkpoints  how is a checkpoint stored on disk, and how are weights copied
"""
