"""A plan as a folder that trains it elsewhere: under torchrun, in a batch job, in a container.

Nothing is run here, and no framework is loaded. The input is a plan; the output is text and files.
In reading order:

    cell         is a cell complete: is it Python, what does it use from its notebook
    script       the cell as a file that Python starts, with Workbench or without it
    packages     the packages to install, including Workbench
    folder       the folder around it: pinned values, how it is started
    published    templates, and the check of their results against the platforms' published schemas
    envelopes    the additional files for each platform
"""
