"""Engines on other machines: one agent on each host, which forks the engines of that host.

How agents are started differs (ssh, a Slurm job, mpiexec); what they do is the same everywhere. In
reading order:

    settings       what may be asked for: launcher, hosts, nodes, time, set-up lines, options
    configuration  a line, arguments and files made into that, checked before anything starts
    wire           what do kernel and agents say to each other, and how is it kept secret
    agent          the process on a host: forks engines, tells how they end, ends with its kernel
    agents         the kernel's end: which hosts are there, and what is asked of them
    launchers      how are agents started, by ssh and mpiexec; what is said when none comes
    slurm          how are they started as a job, or in the allocation that we are in
    places         which engine is on which host
    gpus           which GPU does it get there
"""
