"""What is known of a run: rows of all ranks in, columns, totals, curves and snapshots out.

Pure but for `disk` and `folders`; knows no cluster and no view. From the disk up to what is drawn:

    folders        where are runs kept between sessions
    disk           what do engines and kernel write of a run, and how is it read again
    events         what do a run's events say: start, evaluations, notes, end
    reducer        what becomes of a row: joined over ranks, kept, thinned
    totals         what are the exact sums over a whole run
    recent         what do the latest steps say: timeline, straggler, throughput
    store          the history itself: who puts rows in, who reads what
    run_data       what does everything below a run know of it
    snapshot       what is a view given to draw
    take_snapshot  how is that computed from a history
    analysis/      what do one or several finished runs tell
"""
