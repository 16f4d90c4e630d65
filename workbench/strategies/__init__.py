"""The strategies: a file each, written like the textbook's page on it.

What a strategy must do is `engine/contract.py`; which there are is said by `catalog/`.

    torch/       PyTorch's
    tensorflow/  TensorFlow's
"""
