"""A plan as a folder that trains it elsewhere: under torchrun, in a batch job, in a container.

Nothing is run here, and no framework is loaded: a plan goes in, text and files come out. In reading
order:

    cell         is a cell whole: is it Python, what does it take from its notebook
    script       the cell as a file that Python starts, with Workbench or without it
    packages     what is to be installed, Workbench itself included
    folder       the folder around it: what was pinned, how it is started
    published    templates, and whether what comes of them is as the platforms have published
    envelopes    what each platform is given besides
"""
