"""The workers of a run that goes on: who takes part, and who holds it up.

In reading order:

    healing     who takes part when a worker has died and a fresh one comes
    stragglers  who is slow for long, and which shares of the batch suit all
    shedding    such shares agreed on with the workers
    hangs       who waits for whom, and for how long already
"""
