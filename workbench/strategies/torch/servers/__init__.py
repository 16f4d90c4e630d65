"""Parameters on servers: what `central_storage` and `parameter_server` share.

In reading order:

    strategy      what do both do alike on a worker, whose optimizer steps elsewhere
    links         how do gradients get to all servers, and parameters back
    shards        which server holds which parameters
    rows          what travels of a table of which a step uses a few rows
    shard_server  what does a server hold, and how does it answer
    copies        how is a part held by two servers, and what if one of them dies
"""
