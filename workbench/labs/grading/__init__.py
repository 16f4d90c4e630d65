"""Grades notebooks that students hand in: `workbench grade`, or `grade` from Python.

    reading    a file becomes cells, whatever is in it
    merging    the student's exercise cells in the lab as it was handed out
    runner     a process for each notebook: starts kernels, sends cells, settles every exercise
    kernel     the kernel that students' cells run in; inside: what the grader does within it
    link       the runner's wire to a kernel; watch: its memory and processes
    processes  finds and ends whatever a notebook has started
    supervise  starts runners, and outlives what they meet; showing: table and JSON

Nothing is loaded here: a kernel must not carry what only the grader needs.
"""

from __future__ import annotations
