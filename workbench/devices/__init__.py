"""Accelerators as the notebook's side knows them, and what engines receive of it.

Nothing here imports a framework: a CUDA call in the kernel would take memory on every GPU, and in
a warm parent it would make forking impossible. In reading order:

    mask          which kinds there are, and how is a process shown some devices only
    limits        what does an administrator allow on this machine, and who could listen on it
    discovery     which devices are there, and what could not be found out
    reservations  which of them does another notebook hold
    leases        which worker gets which
"""
