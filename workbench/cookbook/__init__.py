"""What is trained: recipes, those of the user and those that come with the package.

No framework is imported: a recipe is source code, which the engines run.

    recipe   what is a recipe, and how is it made of a cell or a function
    builtin  which recipes come with the package: digits, a character language model
"""
