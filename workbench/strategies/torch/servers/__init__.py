"""Parameters on servers: what `central_storage` and `parameter_server` share.

In reading order:

    strategy      what do both do alike on a worker, whose optimizer steps elsewhere
    shards        which server holds which parameters, and how do they get there and back
    shard_server  what does a server hold, and how does it answer
"""
