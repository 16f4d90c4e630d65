"""Grades notebooks that students hand in: `workbench grade`, or `grade` from Python.

    supervise  how are runners started, and what if one ends too early
    runner     how is one notebook read, run and graded, in its own process
    reading    how does a file become cells of the lab, whatever is in it
    link       how does the runner talk to a kernel, and how are checks made through it
    kernel     the kernel that students' cells run in
    inside     what does that kernel do for the grader
    isolation  how is such a kernel kept apart from the checks
    jail       the program that isolates a kernel
    processes  what may a notebook start and use, and how are its processes ended
    results    the result of an exercise and of a notebook, shown and saved

Nothing is loaded here, because a kernel must not contain what only the grader needs.
"""

from __future__ import annotations
