"""The notebook's side of a session: what is shown, variables, recipes.

In reading order:

    session    which cluster is the notebook's, how are its cells run, and resumed
    run_view   how is a run shown while it continues
    awake      how does the server know that a kernel is in use while a run continues
    values     how do variables and texts get to the engines and back
    recipes    what can be trained by its name
    jobs       `wb.job`, `wb.submit`, `wb.follow`: from the notebook to a job, and back
    scaling    what several numbers of workers gained: figure, table, files
    compare    `wb.compare`, `wb.strategies`, `wb.diagram`, `wb.calibrate`: what there is to know
    sweep      `wb.sweep`: every combination of what is given in lists, and what came of it
    completion  what Tab offers of a run, a cluster and a history
    auto       `%%distributed auto`, `wb.choose`: short runs, a ranking, one to train under
"""
