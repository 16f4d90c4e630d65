"""What an engine knows of PyTorch; the strategies are in `strategies/torch`.

In reading order:

    accelerator  how is the device used on which an engine computes, asked in one place
    support      which seeds, threads and names does PyTorch get, and what do its errors mean
    group        how does a worker join a process group, and leave it
    waits        how is a collective left that gloo cannot end
    data         how does the user's data become shares of global batches
    same_batch   do the workers that need the same batch read the same one
    checkpoints  how is a checkpoint written, and read without unpickling
    horovod/     what does code written for Horovod find instead
"""
