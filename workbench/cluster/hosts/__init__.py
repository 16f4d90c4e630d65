"""Engines on other machines: one agent on each host, which forks the engines of that host.

How agents are started differs (ssh, a Slurm job, mpiexec); what they do is the same everywhere. In
reading order:

    settings   what may be asked for: launcher, hosts, nodes, time, set-up lines, options
    wire       what do kernel and agents say to each other, and how is it kept secret
    agent      the process on a host: forks engines, tells how they end, ends with its kernel
    agents     the kernel's end: which hosts are there, what is asked of them, and their files
    launchers  how agents are started: ssh, sbatch, srun, mpiexec; what they say when they cannot
    places     which engine is on which host
"""
