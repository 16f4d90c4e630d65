"""The checks of labs 10 to 13, which are assignments for a graduate course.

In reading order:

    lab_10  data parallelism from hooks
    lab_11  sharded optimizer state, and a tensor-parallel block
    lab_12  compression and local steps at equal bytes
    branches  the rest of lab 12: federated branches, noise and masks
    lab_13  a scaling study
    on_engines  what these checks ask of answers on the engines

`branches` has the checks of lab 12's federated branches. `on_engines` has what several checks ask
of answers on the engines, and the code that calls lab 11's divided layers there.
"""
