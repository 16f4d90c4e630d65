"""What the notebook's side and the engines' side both know, as data: no framework, no notebook.

In reading order:

    magic_args   what are the lines of all magics made of, and what does `%cluster` ask for
    flags/       how is a flag said, and how several values of it
    run_request  what can be asked of a run: a field per flag, and the parser made of it
    faults       what can be injected
    log_targets  where can `--log` write to
    plan         what is run, checked; and how is it written back as a cell
    members      who takes part in a run
    cluster_env  which cluster does a process belong to, and what do imports depend on
    messages     what do kernel and engines say to each other
    protocol     how do these messages travel, signed and once
    events       what happens in a run, which states follow, what comes when in a Stop
    record       what is a step measured in, and what is derived from it
    checkpoints  how does a checkpoint lie on disk, and how are weights carried over
"""
