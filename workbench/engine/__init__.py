"""An engine: the code in the process of a worker or a server.

Only the module `entry` knows IPython; no module here knows the notebook's side. From the outside
in:

    entry         where does a call from the notebook arrive, and what is the answer
    runtime       what happens around a cell: names, threads, process group, cleanup
    context       what do a cell, a strategy or `wb.fit` know about their run
    contract      what must a strategy do
    training/     `wb.fit`, `wb.prepare`, `wb.log`: how is a model trained, step by step
    checkpoints/  what is saved of a run, and how
    telemetry/    how is a step measured, held back and reported
    debugging/    what does a rank say when it waits, stops or fails
    transport/    links between workers and servers that need no framework
    torch/        the code of an engine that needs PyTorch
    tensorflow/   the code of an engine that needs TensorFlow
    output        what happens to a cell that prints without end
    activity_log  what does an engine record for a kernel that connects later
    kernel_watch  is the notebook still there, and what happens if not
    interrupt     how does an interrupt end a wait in C++
    job           the same under torchrun, without a notebook: a job's process, start to end
    meeting       which process of a job is this, and how do they meet
    testing       how is a cell run in this process, for tests of strategies
"""
