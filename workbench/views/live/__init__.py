"""A run while it trains, and its last picture.

In reading order:

    live    how is it shown here: widget, SVG, a line of text, or not at all
    frames  what is the browser sent, and the widget that gets it
    svg     the dashboard as SVG
    figure  the picture that stays
"""
