"""The strategies: one file each, written like a textbook page about the strategy.

`engine/contract.py` defines what a strategy must do; `catalog/` lists the strategies.

    torch/       PyTorch's
    tensorflow/  TensorFlow's
"""
