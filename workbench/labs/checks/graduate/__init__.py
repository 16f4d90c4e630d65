"""The checks of labs 10 to 13, which are assignments for a graduate course.

In reading order:

    lab_10  data parallelism from hooks
    lab_11  sharded optimizer state, and a tensor-parallel block
    lab_12  compression and local steps at equal bytes, and federated branches
    lab_13  a scaling study
"""
