"""The parts that TensorFlow's strategies share.

In reading order:

    replica      divides a global batch over the replicas
    traced_step  a step while TensorFlow traces it
    markers      when each replica's gradients were ready
    steps        turns these marks into rows, and checks that the strategy is the run's
    stages       when each stage worked
    models       names and moves the weights of a Keras model
"""
