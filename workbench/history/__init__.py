"""The data of a run: from rows of all ranks to columns, totals, curves and snapshots.

All modules except `disk` and `folders` are pure; no module uses clusters or views. From the disk to
the view:

    folders        where are runs kept between sessions
    disk           the files that engines and kernel write for a run, and their reader
    events         the events of a run: start, evaluations, notes, end
    reducer        how rows are joined over ranks, stored and thinned
    totals         the exact sums over a whole run
    recent         the latest steps: timeline, straggler, throughput
    store          the history, with methods for writers and readers
    run_data       the interface of a run for modules below it
    snapshot       the data that a view draws
    take_snapshot  how a snapshot is computed from a history
    analysis/      analysis of one or several finished runs
"""
