"""TensorFlow's strategies, one file each; shared code is in the subfolders.

In reading order:

    one_device             the baseline: one device
    mirrored               a replica on each device of one engine
    multi_worker_mirrored  a replica on each worker, gradients averaged
    central_storage        variables on one device, replicas on all
    parameter_server       servers hold the variables, a coordinator hands out steps
    model_split            the layers of one model on several devices
    tpu                    a replica on each core of a TPU
    parts/                 code that several strategies share
    keras/                 `model.fit` under them
    coordinator/           what runs under a coordinator
"""
