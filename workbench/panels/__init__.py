"""`wb.panel()`: Workbench controlled with the mouse. One model per notebook, any number of widgets.

In reading order:

    model       the base class of the panel's parts, and their shared data
    choice      the user's choices, and the plans made from them
    recipe      the part for choosing the recipe
    strategies  the part for choosing strategies and options
    cluster     the part that shows engines and the queue
    live        the part that shows the run, with its controls, faults and explanations
    comparison  the part that shows runs side by side
    scaling     the part that shows the speed-up with several numbers of workers
    show        how are the parts combined, shown, and kept up to date
"""
