"""Replaces `horovod.torch` for code written for Horovod, if Horovod is not installed.

All of it is `torch.distributed` over the present group, and is used only on engines. In reading
order:

    finder     how does `import horovod.torch` find this
    ranks      which processes are there
    messages   what do ranks send to each other
    gradients  how are gradients averaged over all ranks while backward runs
    optimizer  what does an optimizer do with them
"""
