"""The workers of a run that goes on: who takes part, and who holds it up.

In reading order:

    healing     who takes part when a worker has died and a fresh one comes
    departures  who was told to end, and how it leaves
    hangs       who waits for whom, and for how long already
"""
