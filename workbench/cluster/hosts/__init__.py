"""Engines on other machines: one agent on each host, which forks the engines of that host.

Agents are started in different ways (ssh, a Slurm job, mpiexec), but all work in the same way. In
reading order:

    settings       what can be requested: launcher, hosts, nodes, time, set-up lines, options
    configuration  makes settings from a line, arguments and files, and checks them
    wire           which messages do kernel and agents exchange, and how are they encrypted
    agent          the process on a host: forks engines, tells how they end, ends with its kernel
    agents         the kernel's side: which hosts exist, and which requests do they get
    launchers      how do ssh and mpiexec start agents; the errors if no agent comes
    slurm          how are they started as a job, or in the current allocation
    places         which engine is on which host
    gpus           which GPU does it get there
"""
