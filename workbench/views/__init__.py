"""What is drawn: functions of snapshots and results, never of a client.

Tables and text stand here, pictures of a kind in a folder each:

    theme        which colours; what do figures drawn as SVG have in common
    table        how does a table look as HTML and as text
    tables       the tables that notebooks show, of a run and of several
    text         a run in words; how are numbers written
    terminal     what would a terminal show of a stream
    output       how are the outputs of several ranks shown
    places       what can the front end show: Colab, Kaggle, any other Jupyter
    blocks       how are they displayed and kept up to date
    drawing      what do figures drawn with matplotlib have in common
    live/        a run while it trains, and its last picture
    comparison/  runs side by side
    scaling/     runs over the numbers of workers
    explain/     who waited for whom, who sends what to whom
    panel/       the panel in the browser
"""
