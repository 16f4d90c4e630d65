"""Saves a run while it trains, so that it can be continued.

In reading order:

    checkpoints      when is a checkpoint written, by which rank, with which content
    files            how is a file completed: written, flushed, renamed
    memory_snapshot  what does a worker keep in memory in case another one dies
"""
