"""The parts that PyTorch's strategies share.

In reading order:

    replica              how does a share of a batch become gradients and an update
    user_loop            how are the steps of a user's own loop recorded
    loop_healing         how does such a loop continue when a worker dies or joins
    watched              how is a loop recorded that does its own communication
    scripts              what trains in a script that does not use Workbench
    loader               which batches does a user's own loop get
    reduction            how are the gradients of copies averaged, for any call of backward
    averaging            which all-reduce averages a run's gradients, compressed or not
    timing               when were a worker's gradients ready, and how long did it wait
    guard                do copies begin equal, and are they still
    parameter_averaging  how do copies that train separately exchange parameters
    layout               how is a model divided in place, and put together again
"""
