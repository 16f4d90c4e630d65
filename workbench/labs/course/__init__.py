"""A course with the labs: hand out, collect, and keep the grades.

In reading order:

    release    what do students get
    collect    what did they hand in, in the layouts of learning platforms
    gradebook  which points does each student have, as CSV
    feedback   what do students get back
    commands   `workbench release` and `workbench collect`, and the flags of `workbench grade`
"""
