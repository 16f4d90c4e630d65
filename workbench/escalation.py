"""What happens after how many seconds when a run is stopped, or a cell interrupted: one table.

    Stop
    at once              the kernel asks every worker for its step; where workers take steps apart,
                         it tells each to stop after the one it is in
    ANSWER_S             a worker has not answered: all are interrupted
    REACH_S              the agreed step is not reached (about two steps, within these bounds): the
                         same
    CLEAR_S              all have left the cell, some have not cleared away: the same

    Interrupt
    at once              SIGINT to every engine of the cell
    GRACE_S              the same to the others where one rank has failed and they went on
    BREAK_OUT_S          an engine's main thread waits in C++: its connections are shut down; after
                         as long again its store's too
    AGAIN_S              sent again, and again after as long: a cell may catch it and go on
    KILL_S               the engine is ended (SIGKILL); until then
      CLEARING_S         an engine that was told to end and did is deaf to interrupts
      GROUP_GONE_S       a process group that does not go is broken; it is left after as long again
    HEARD_S              nobody has told of that engine's end: the cell is over all the same
    SETTLE_S             the notebook's cell comes back, whatever is left

Pure, for both sides.
"""

from __future__ import annotations

ANSWER_S = 1.0
"""How long a worker may be silent: its position comes from a thread that waits for nobody."""
REACH_S = (0.8, 2.0)
"""Least and longest time to the agreed step."""
CLEAR_S = 10.0
"""How long workers may take to clear away what a run has left."""

GRACE_S = 0.5
BREAK_OUT_S = 0.2
AGAIN_S = 1.5
KILL_S = 8.0
CLEARING_S = 5.0
GROUP_GONE_S = 3.0
HEARD_S = 3.0
SETTLE_S = CLEAR_S + KILL_S + HEARD_S + 3.0
"""Longer than it takes to end an engine that no interrupt reaches, nor its answer us: also one that
has left its cell and is given time to clear away."""
