"""An engine: what happens in the process of a worker or a server.

No module but `entry` knows IPython; nothing here knows the notebook's side. From the outside in:

    entry         where does a call from the notebook come in, and what goes back
    runtime       what happens around a cell: names, threads, process group, clearing away
    context       what does a cell, a strategy or `wb.fit` know of its run
    contract      what must a strategy do
    training/     `wb.fit`, `wb.prepare`, `wb.log`: how is a model trained, step by step
    checkpoints/  what is kept of a run, and how does it survive
    telemetry/    how is a step measured, held back and reported
    debugging/    what does a rank say when it waits, stops or fails
    transport/    links between workers and servers that need no framework
    torch/        what an engine knows of PyTorch
    tensorflow/   what an engine knows of TensorFlow
    output        what happens to a cell that prints without end
    activity_log  what does an engine write down, for a kernel that comes later
    kernel_watch  is the notebook still there, and what if not
    interrupt     how does an interrupt end what blocks in C++
    job           the same under torchrun, without a notebook: a job's process, start to end
    meeting       which process of a job is this, and how do they meet
    testing       how is a cell run in this process, for tests of strategies
"""
