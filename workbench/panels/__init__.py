"""`wb.panel()`: the workbench with the mouse. One model per notebook, any number of widgets.

In reading order:

    model       what is a part of the panel, and what do they know in common
    choice      what is picked, and which plans come of it
    recipe      the part that picks what is trained
    strategies  the part that picks strategies and options
    cluster     the part that shows engines and the queue
    live        the part that shows the run, with its controls, faults and explanations
    comparison  the part that shows runs side by side
    scaling     the part that shows what several numbers of workers gained
    show        how are the parts put together, shown, and kept up to date
"""
