"""The panel in the browser: one widget, a script per section.

In reading order:

    widget  what is the browser sent, and what does it ask for
"""
