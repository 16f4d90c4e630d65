"""Recipes: the code that is trained. Users write recipes, and some come with the package.

No framework is imported: a recipe is source code, which the engines run.

    recipe       what is a recipe, and how is it made of a cell or a function
    builtin      which recipes come with the package
    digits       handwritten digits, by a few layers
    transformer  the next character of a text, by a transformer of any size
    recommender  ratings, by two embedding tables of any size
    tissue       healthy or abnormal tissue, by a residual network
    fraud        which payments are fraud, by three layers
    sizes        which sizes are not allowed
"""
