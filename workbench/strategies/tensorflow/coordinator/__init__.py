"""The code that runs under TensorFlow's coordinator, for `parameter_server`.

In reading order:

    servers   how does an engine become a task of TensorFlow's cluster
    closures  how is each closure seen and measured
    feeds     how does a closure get its samples
    fit       how does `wb.fit` become closures
"""
