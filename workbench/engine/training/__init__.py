"""`wb.fit` and a user's own loop: how a model is trained under a strategy.

In reading order:

    fit            what does `wb.fit` do, from its arguments to its result
    fit_arguments  what may it be passed, and what is wrong with it
    shares         which samples form which batch, and who takes which of them
    initial        with which weights does a run start
    loop           what happens in each step of `wb.fit`
    user_loops     how is a user's own loop distributed: `wb.prepare`, `wb.watch`
    notes          what may a cell say and ask: `wb.log`, `wb.options`
    regrouping     how do workers meet again when one has left or joined
"""
