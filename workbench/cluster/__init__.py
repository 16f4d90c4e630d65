"""Processes: engines and the services that they need, from start to end.

Nothing here knows what a run is. The modules, from the machine up to the cluster:

    processes    how is a helper process started, and how did a process end
    folders      where are the private files of a cluster, and which clusters exist
    controller   ipyparallel's controller, as a program that ends by itself
    hub          how is a controller started, and how does this kernel talk to it
    forkserver/  the warm parent, which forks engines with the framework loaded
    hosts/       how are engines started on other machines
    services     how are these services prepared before engines are requested
    progress     how far is a start of engines
    engines      how are engines started, watched, called and stopped
    calls        how is a function called on engines, and how do its outputs return
    router       how do messages of the control path reach the kernel, and leave it
    vitals       what does each engine's process use, and what is its last log line
"""
