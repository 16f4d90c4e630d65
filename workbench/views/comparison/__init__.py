"""Runs side by side.

In reading order:

    panels   what does each panel of the picture show
    picture  how is the picture put together
    exports  how do they look for other tools
"""
