"""The workers of a run while it trains: which take part, and which delay it.

In reading order:

    change      what a change of workers brings
    copies      who can go on where several workers hold a copy of the model together
    healing     who takes part when a worker has died and a fresh one comes
    scaling     more or fewer workers in a run that goes on
    stragglers  who is slow for long, and which shares of the batch suit all
    shedding    the rows that tell; such shares, agreed on with the workers
    replacing   a fresh engine for a worker that is slow for long
    silence     who has been halted, and is ended for that
    departures  who was told to end, and how it leaves
    hangs       who waits for whom, and for how long already
"""
