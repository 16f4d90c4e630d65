"""A run from its request to its end: what engines are asked, what comes back, how it ends."""
