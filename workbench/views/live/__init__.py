"""A run while it trains, and its last picture.

In reading order:

    live    how a run is shown here: widget, SVG, a line of text, or not at all
    frames  the messages to the browser, and the widget that receives them
    svg     the dashboard as SVG
    figure  the picture that stays in the notebook
"""
