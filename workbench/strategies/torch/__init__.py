"""PyTorch's strategies, one file each; shared code is in the subfolders.

In reading order:

    one_device        the yardstick: one device
    mirrored          a copy on each worker, gradients averaged in each step
    local_sgd         copies train apart for some steps, then average
    gossip            each worker averages with its neighbours only
    central_storage   one server holds parameters and optimizer
    parameter_server  servers hold parameters, nobody waits
    sharded           each worker keeps a part of parameters, gradients and optimizer
    tensor_parallel   the matrices of a layer divided over the workers
    model_split       a pipeline of stages
    hybrid            several pipelines, each with a share of the batch
    parts/            what several of them are made of
    allreduce/        all-reduce, by algorithm
    servers/          parameters on servers
    pipeline/         a model cut into stages
"""
