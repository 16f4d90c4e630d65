"""What an engine knows of TensorFlow; the strategies are in `strategies/tensorflow`.

In reading order:

    accelerator  which GPUs does TensorFlow see, what are their names, what does it take of them
    support      which devices, threads and seeds does it get, and what do its errors mean
    data         how does the user's data become shares of global batches
    models       how are Keras models and optimizers taken, and their weights named
    checkpoints  how is a checkpoint written and read
"""
