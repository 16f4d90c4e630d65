"""What finished runs tell: functions of a history, without a cluster or a view.

In reading order:

    steady          how fast was a run without its warm-up
    summary         what is one run in numbers
    rows            what does a comparison say of each plan, over its seeds
    comparison      what did several runs gain, what did they cost, is it a fair test
    scaling/        what did several numbers of workers gain, by which law
    blame           who waited for whom
    counterfactual  what if one worker were as fast as the others
    step_picture    what was measured on the diagram of one step
    series          which numbers of a run are new since the last time, for other tools
"""
