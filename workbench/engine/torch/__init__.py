"""What an engine knows of PyTorch; the strategies are in `strategies/torch`.

In reading order:

    support      which seeds, threads and names does PyTorch get, and what do its errors mean
    group        how does a worker join a process group, and leave it
    data         how does what the user passes become shares of global batches
    checkpoints  how is a checkpoint written, and read without unpickling
"""
