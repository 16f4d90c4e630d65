"""Helpers of `model_split`: cutting a model into stages, balancing them, running and timing them."""
