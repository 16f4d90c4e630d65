"""What TensorFlow's strategies are made of.

In reading order:

    replica      how is a global batch divided over the replicas
    traced_step  what happens to a step while TensorFlow traces it
    markers      when were each replica's gradients ready
    steps        how do these marks become rows
    layers       where is a Keras model cut into stages
    stages       when did each stage work
    models       how are a Keras model's weights named and moved
    patches      how are methods replaced for a time
"""
