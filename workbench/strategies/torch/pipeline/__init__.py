"""Helpers of `model_split`: cutting a model into stages, running and timing them."""
