"""The workers of a run while it trains: which workers take part, and which workers delay the run.

In reading order:

    change      one change of the workers: its goal and its notes
    copies      which workers can continue where several workers hold one copy of the model
    healing     which workers take part after a worker has died and a new worker comes
    scaling     more or fewer workers in a running run
    stragglers  which workers are slow for a long time, and which shares of the batch suit all
    shedding    agrees on such shares with the workers
    replacing   a new engine in place of a worker that is slow for a long time
    silence     which workers a signal has halted; these workers are ended
    departures  which engines the system told to exit, and how they leave
    hangs       which workers wait for which other workers, and for how long
"""
