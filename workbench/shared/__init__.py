"""What the notebook's side and the engines' side both know, as data: no framework, no notebook."""
