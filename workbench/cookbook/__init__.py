"""What is trained: recipes, those of the user and those that come with the package.

No framework is imported: a recipe is source code, which the engines run.
"""
