"""The notebook's side of a session: views, variables, recipes.

In reading order:

    session    the notebook's cluster, and how its cells are run and resumed
    run_view   how is a run shown while it continues
    awake      tells the server that a kernel is in use while a run continues
    values     how do variables and texts get to the engines and back
    recipes    trainings with a name
    jobs       `wb.job`, `wb.submit`, `wb.follow`: from the notebook to a job, and back
    scaling    the speed-up with several numbers of workers: figure, table, files
    compare    `wb.compare`, `wb.strategies`, `wb.diagram`, `wb.calibrate`
    sweep      `wb.sweep`: every combination of listed values, and the results
    completion  the names that Tab offers for a run, a cluster and a history
    auto       `%%distributed auto`, `wb.choose`: short runs, a ranking, the best strategy
"""
