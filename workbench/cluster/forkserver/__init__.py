"""The warm parent: has imported the framework, forks engines, reaps them.

It is a separate process; `client` and `parents` run in the kernel, `keeper` in a child.

    server   the warm parent itself: how does it fork, and which commands does it accept
    preload  what does it import, and can it still fork afterwards
    turns    who imports first if a whole class starts at once
    owner    who owns it: the kernel that started it, the next kernel, or no kernel
    keeper   the process that holds the store where workers meet
    client   how does the kernel talk to one warm parent
    parents  how does a cluster hold one for each framework
"""
