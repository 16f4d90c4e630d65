"""What is trained: recipes, those of the user and those that come with the package.

No framework is imported: a recipe is source code, which the engines run.

    recipe            what is a recipe, and how is it made of a cell or a function
    builtin           which recipes come with the package
    digits_mlp        handwritten digits, fully connected layers
    digits_cnn        handwritten digits, a small convolutional network
    char_transformer  a character language model
"""
