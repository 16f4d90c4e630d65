"""The parts that TensorFlow's strategies share.

In reading order:

    replica      how is a global batch divided over the replicas
    traced_step  what happens to a step while TensorFlow traces it
    markers      when were each replica's gradients ready
    steps        how do these marks become rows, and is this strategy the run's
    stages       when did each stage work
    models       how are a Keras model's weights named and moved
"""
