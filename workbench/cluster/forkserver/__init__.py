"""The warm parent: has imported the framework, forks engines, reaps them.

It is a process of its own; `client` and `parents` run in the kernel, `keeper` in a child.

    server   the warm parent itself: how does it fork, and what may it be asked
    preload  what does it import, and may it still fork afterwards
    turns    whose turn is it to import, where a class begins at once
    owner    who owns it: the kernel that started it, the next one, or nobody
    keeper   the process that holds the store where workers meet
    client   how does the kernel talk to one warm parent
    parents  how does a cluster hold one for each framework
"""
