"""Results of finished runs: functions of a history, without a cluster or a view.

In reading order:

    steady          how fast a run was without its warm-up
    summary         one run in numbers
    rows            one row of a comparison: a plan over its seeds
    comparison      gain and cost of several runs, and whether the test is fair
    scaling/        gain from more workers, and the law that fits
    blame           which worker waited for which other worker
    counterfactual  the run if one worker had been as fast as the others
    step_picture    the diagram of one step with its measured values
    series          the new numbers of a run since the last call, for other tools
"""
