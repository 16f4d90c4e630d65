"""A plan as a folder that trains it elsewhere: under torchrun, in a batch job, in a container.

Nothing is run here, and no framework is loaded: a plan goes in, text and files come out. In reading
order:

    script       the cell as a file that Python starts, with Workbench or without it
    folder       the folder around it: what to install, what was pinned, how to start it
    envelopes    what each platform is given besides
"""
