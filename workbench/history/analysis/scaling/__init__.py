"""Runs with several numbers of workers: what was gained by each, by which law, for what price.

In reading order:

    laws     which law do the points follow: Amdahl's, Gustafson's, none
    curves   what is known of each plan and number of workers, and how is it written
    words    should it be distributed, and why not
    of_runs  which runs make a curve, and what are they held against
"""
