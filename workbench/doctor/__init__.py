"""`workbench doctor`: what of this machine, its GPUs and other hosts works, and what to do next.

In a notebook, `wb.doctor()` is this package called. Nothing here loads a framework: what needs one
is done in processes of their own, each with a time box, so that a hang is an answer too.

    report     what a check found: ok, warn, fail, cannot be checked; as text, JSON, a table
    children   a process with a time box, and what it says while it lives
    machine    checks of this machine that need no framework
    gpus       checks that need a driver, a GPU or a framework
    hosts      checks between this machine and others
    gpu_test   the stages of `--gpu-test`, one after the other, and their report
    probes     (in a process of its own) what touches devices for the doctor
    stages     (in a process of its own) what `--gpu-test` does with real engines
    faults     (in a process of its own) what it breaks on purpose
"""
