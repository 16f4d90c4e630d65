"""Stands in for `horovod.torch` where code is written for Horovod, which no longer builds.

All of it is `torch.distributed` over the group that is there, and lives on engines alone. In
reading order:

    finder     how does `import horovod.torch` come to be this
    ranks      who is there
    messages   what do ranks send to each other
    gradients  how do gradients become those of all ranks while backward runs
    optimizer  what does an optimizer do with them
"""
