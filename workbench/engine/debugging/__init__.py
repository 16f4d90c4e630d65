"""The reports of a rank when it waits, when it stops for its user, and when it fails.

In reading order:

    marks         which functions wait, and where does a cell begin in a stack
    stacks        where are this engine's threads
    tracebacks    how is the error of a cell shown
    postmortem    which frames of a failed cell are kept
    stdin_bridge  how does a rank ask its user, and who is waiting for an answer
    debugger      how does `breakpoint()` open pdb in the notebook
"""
