"""Parameters on servers: what `central_storage` and `parameter_server` share.

In reading order:

    strategy      what do both do on a worker, whose optimizer steps elsewhere
    links         how do gradients get to all servers, and parameters back
    shards        which server holds which parameters
    rows          what is sent of a table of which a step uses a few rows
    remote        how is an optimizer's step an exchange with the servers
    shard_server  what does a server hold, and how does it answer
    sessions      who opens sessions, and who continues in them when workers die
    copies        how is a part held by two servers, and what if one of them dies
"""
