"""Runs side by side.

In reading order:

    panels   the content of each panel of the picture
    picture  puts the picture together
    exports  text for other tools
"""
