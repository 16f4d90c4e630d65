"""The notebook's side of a session: magics, what is shown, variables, recipes."""
