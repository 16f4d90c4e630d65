"""Parameters on servers: what `central_storage` and `parameter_server` share.

In reading order:

    strategy      what do both do on a worker (its optimizer runs on the servers)
    links         how do gradients get to all servers, and parameters back
    shards        which server holds which parameters
    rows          which rows are sent if a step uses only a few rows of a table
    remote        how is an optimizer's step an exchange with the servers
    shard_server  what does a server hold, and how does it answer
    sessions      who opens sessions, and who continues in them when workers die
    copies        how do two servers hold a part, and what if one of them dies
"""
