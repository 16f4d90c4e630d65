"""All drawings: functions of snapshots and results, never of a client.

Tables and text are here; each kind of picture has a folder:

    theme        the colours, and the shared parts of SVG figures
    table        how does a table look as HTML and as text
    tables       the tables that notebooks show, of a run and of several
    text         a run in words, and the format of numbers
    terminal     the text that a terminal would show of a stream
    output       how are the outputs of several ranks shown
    places       the abilities of the front end: Colab, Kaggle, other Jupyter
    blocks       how are these outputs displayed and kept up to date
    drawing      the shared parts of figures drawn with matplotlib
    live/        a run while it trains, and its final picture
    comparison/  runs side by side
    scaling/     runs over the numbers of workers
    explain/     which worker waited for which, and their messages
    panel/       the panel in the browser
"""
