"""PyTorch's strategies, one file each; shared code is in the subfolders.

In reading order:

    one_device        the baseline: one device
    mirrored          a copy on each worker, gradients averaged in each step
    local_sgd         copies train separately for some steps, then average
    gossip            each worker averages only with its neighbours
    central_storage   one server holds parameters and optimizer
    parameter_server  servers hold parameters, no worker waits
    sharded           each worker keeps a part of parameters, gradients and optimizer
    tensor_parallel   the matrices of a layer divided over the workers
    model_split       a pipeline of stages
    hybrid            several pipelines, each with a share of the batch
    parts/            code that several strategies share
    allreduce/        all-reduce, by algorithm
    servers/          parameters on servers
    pipeline/         a model cut into stages
"""
