"""Grades notebooks that students hand in: `workbench grade`, or `grade` from Python.

    reading      a file becomes cells, whatever is in it
    merging      the student's exercise cells in the lab as it was handed out
    runner       a process for each notebook: reads, merges, and says what is known
    settling     its heart: runs the lab, again where a cell broke it, until all is settled
    kernel       the kernel that students' cells run in; inside: what it tells the grader
    marking      the checks, made in the runner: a kernel is asked for plain data only
    isolation    how a kernel is kept apart; jail: the program that makes such a place
    environment  what of ours a kernel sees, its folders, and their removal
    limits       what a notebook may use; watch: ends it when it uses more
    link         the runner's wire to a kernel
    processes    finds and ends whatever a notebook has started; hides our own
    supervise    starts runners, and outlives what they meet
    outcome      what came out, of an exercise and of a notebook
    showing      table and JSON; saving: a file that is whole at any time

Nothing is loaded here: a kernel must not carry what only the grader needs.
"""

from __future__ import annotations
