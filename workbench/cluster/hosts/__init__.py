"""Engines on other machines: one agent on each host, which forks the engines of that host.

How agents are started differs (ssh, a Slurm job, mpiexec); what they do is the same everywhere. In
reading order:

    settings       what may be asked for: launcher, hosts, nodes, time, set-up lines, options
    configuration  a line, arguments and files made into that, checked before anything starts
"""
