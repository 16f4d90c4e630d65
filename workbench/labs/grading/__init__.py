"""Grades notebooks that students hand in: `workbench grade`, or `grade` from Python.

    supervise  how are runners started, and what if one does not come back
    runner     how is one notebook read, run and settled, in a process of its own
    reading    how does a file become cells of the lab, whatever is in it
    link       how does the runner talk to a kernel, and how are checks made through it
    kernel     the kernel that students' cells run in
    inside     what does it do for the grader
    isolation  how is such a kernel kept apart from the checks
    jail       the program that makes such a place
    processes  what may a notebook start and use, and who ends what is left of it
    results    what came out of an exercise and a notebook, and how is it shown and saved

Nothing is loaded here: a kernel must not carry what only the grader needs.
"""

from __future__ import annotations
