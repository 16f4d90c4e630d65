"""The notebook's side of a session: what is shown, variables, recipes.

In reading order:

    session    which cluster is the notebook's, and how are its cells run
    run_view   how is a run shown while it goes on
    values     how do variables and texts get to the engines and back
    recipes    what can be trained by its name
    compare    `wb.compare`, `wb.strategies`, `wb.diagram`: what is there, and how did it do
    calibrate  `wb.calibrate`: does the instrument read what was injected
"""
