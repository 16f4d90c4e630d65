"""The workers of a run that goes on: who takes part, and who holds it up.

In reading order:

    healing  who takes part when a worker has died and a fresh one comes
    halts    who has been halted, and is ended for that
    hangs    who waits for whom, and for how long already
"""
