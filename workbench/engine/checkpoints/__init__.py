"""What is kept of a run while it trains, so that it can be continued.

In reading order:

    checkpoints      when is a checkpoint written, by whom, what is in it
    files            how does a file become whole: written, flushed, renamed
    memory_snapshot  what does a worker keep in memory in case another one dies
"""
