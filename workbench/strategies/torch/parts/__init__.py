"""The parts that PyTorch's strategies share.

In reading order:

    replica              how a share of a batch becomes gradients and an update
    user_loop            records the steps of a user's own loop
    loop_healing         lets such a loop continue when a worker dies or joins
    watched              records a loop that does its own communication
    scripts              finds what trains in a script that does not use Workbench
    loader               the batches that a user's own loop gets
    reduction            averages the gradients of copies, for any call of backward
    averaging            the all-reduce of a run's gradients, compressed or not
    timing               when a worker's gradients were ready, and how long it then waited
    guard                checks that copies begin equal and stay equal
    parameter_averaging  how copies that train separately exchange parameters
    layout               divides a model in place, and restores it
"""
