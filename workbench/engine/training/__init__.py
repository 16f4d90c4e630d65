"""`wb.fit` and a user's own loop: how a model is trained under a strategy.

In reading order:

        fit            what `wb.fit` does, from its arguments to its result
        fit_arguments  what arguments `wb.fit` accepts, and what can be wrong with them
        shares         which samples form which batch, and which worker takes which samples
        initial        with which weights a run starts
        loop           what happens in each step of `wb.fit`
        user_loops     how a user's own loop is distributed: `wb.prepare`, `wb.watch`
        notes          what a cell may log and read: `wb.log`, `wb.options`
        regrouping     how workers meet again after a worker has left or joined
"""
