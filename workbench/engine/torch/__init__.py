"""The part of an engine that knows PyTorch; the strategies are in `strategies/torch`.

In reading order:

        accelerator  how an engine uses the device on which it computes (no other module does this)
        support      which seeds, threads and names PyTorch gets, and what its errors mean
        group        how a worker joins a process group, and leaves it
        waits        how a thread leaves a collective that gloo cannot end
        data         how the user's data become shares of global batches
        checkpoints  how a checkpoint is written, and how it is read without unpickling
        horovod/     what code written for Horovod finds instead of Horovod
"""
