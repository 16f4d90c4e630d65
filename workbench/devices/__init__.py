"""Accelerators: how the kernel finds them, and which of them each engine gets.

Nothing here imports a framework: a CUDA call in the kernel would take memory on every GPU, and in
a warm parent it would make forking impossible. In reading order:

    mask          which kinds are there, and how does a process see only some devices
    limits        what does an administrator allow on this machine, and who could listen on it
    discovery     which devices are there, and which could not be read
    reservations  which of them does another notebook hold
    leases        which worker gets which
"""
