"""What comes in of a run: rows and events of all ranks, in bounded memory or at rest on the disk.

append, event ── queue ── fold ──> Reducer, Story
rest: the rows are on disk only;  wake, or whoever reads: they are read again
rewind: a run goes on from an earlier step, what came after it is forgotten
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RunError
from ..protocol import Topic
from ..record import RECORD
from . import disk, folders, rewind
from .columns import COLUMNS
from .logged import LoggedColumn
from .reducer import Reducer, Rows
from .story import Story
from .table import RowTable

_FOLD_ROWS = 1 << 13
_FIRST_HEARD, _MOST_HEARD = 100, 20_000
"""Of more events than both together, the first and the newest are kept."""


class Intake:
    """Takes in the rows and events of one run; `store.RunHistory` reads them out.

    Appending only queues bytes; rows are joined over ranks and reduced in batches, when somebody
    reads or `_FOLD_ROWS` have piled up. All methods may be called from any thread.

    Args:
        ranks: Engine ids by rank.
        memory_limit_bytes: Bound of the stored rows; beyond it whole steps are dropped evenly.
        clock: Time of events that do not bring their own.
        joined: Whether ranks take each step together. Asynchronous strategies' rows stand alone.
        data_parallel: Whether workers take shares of the batch; else all see the same samples.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        memory_limit_bytes: int = 96 << 20,
        clock: Callable[[], float] = time.perf_counter,
        joined: bool = True,
        data_parallel: bool = True,
    ) -> None:
        self.engines = tuple(ranks)
        self.joined, self.data_parallel = joined, data_parallel
        self.story = Story()
        self._clock = clock
        self._lock = threading.RLock()
        self._queue: list[bytes] = []
        self._queued_rows = 0
        self._shape = (len(self.engines), memory_limit_bytes)
        self._live: Reducer | None = self._fresh()
        self._rests_in = Path()
        self._phases: list[rewind.Phase] = []  # where it went on with fewer workers
        self._slow: tuple[int, tuple[int | None, float, int]] | None = None  # as of so many rows
        self._counted = 0  # rows of earlier steps are left out: they are there already
        self._heard: list[tuple[str, dict[str, Any]]] = []  # what a copy of the run needs

    def append(self, rows: Rows) -> None:
        """Take in RECORD rows of shape (rows,), of any ranks and steps."""
        with self._lock:
            self._queue.append(rows.tobytes())
            self._queued_rows += len(rows)
            if self._queued_rows >= _FOLD_ROWS:
                self._fold()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take in one event of `protocol.EVENTS`."""
        t_s = float(fields.get("t_s") or self._clock())
        with self._lock:
            if name == "log":
                if self._live is not None:  # else it is on the disk, where it will be read
                    self._log(fields, t_s)
                return
            self.story.fold(name, fields, t_s)
            self._keep(name, {**fields, "t_s": t_s})
            self._tell_totals()

    def read(self, folder: Path, phases: Sequence[rewind.Phase] = ()) -> None:
        """Take in all rows and events of a run's folder.

        Args:
            phases: From which step on the run had which workers, where that changed.
        """
        with self._lock:
            self._phases = list(phases)
            self._rebuild(folder)
            for name, fields in disk.read_events(folder):
                if name != "log":
                    self.event(name, fields)

    @property
    def phases(self) -> list[rewind.Phase]:
        """From which step on the run had fewer workers, and which ranks they had."""
        return list(self._phases)

    def finish(self) -> None:
        """Stop waiting for missing rows: those of incomplete steps become rows of their own."""
        with self._lock:
            if self._live is not None:
                self._fold()
                self._reduced.finish()

    def rest(self, folder: Path) -> bool:
        """Let go of the rows of a run that is over, where all of them are in its folder.

        They are read again when they are asked for. The folder is marked, so that no other
        notebook prunes it while this process lives.

        Returns:
            Whether it rests now; what is not on disk stays in memory.
        """
        with self._lock:
            if self._live is None:
                return True
            if self._counted or not self.on_disk(folder):
                return False
            try:
                folders.mark(folder)
            except OSError:  # a full disk: another notebook might prune what is not marked
                return False
            self._live, self._rests_in = None, folder
            self._heard.clear()  # the disk has them
            return True

    def on_disk(self, folder: Path) -> bool:
        """Whether all rows that have come are in the run's folder."""
        with self._lock:
            if self._live is None:
                return True
            self._fold()
            rows = int(self._live.totals.rows.sum()) + self._live.invalid_rows
            return disk.holds(folder, len(self.engines), rows)

    def wake(self) -> None:
        """Have the rows in memory again."""
        with self._lock:
            self._fold()

    @property
    def rests(self) -> bool:
        """Whether its rows are on disk only, until somebody asks for them."""
        return self._live is None

    @property
    def nbytes(self) -> int:
        """Memory that its rows and curves take, in bytes."""
        with self._lock:
            queued = self._queued_rows * RECORD.itemsize
            return queued + (0 if self._live is None else self._live.nbytes)

    def rewind(self, step: int, folder: Path, ranks: Sequence[int] | None = None) -> int:
        """Let the run go on from `step`: its rows and events from there on will come again.

        Args:
            folder: The run's, where engines keep all rows.
            ranks: Ranks of the workers that go on; None leaves them as they are.

        Returns:
            How many steps some worker had done and will be done again.
        """
        with self._lock:
            self._fold()
            lost_steps = max(0, self._reduced.reached + 1 - step)
            if self._cut(folder, step):
                self._phases = rewind.phases_before(self._phases, step)
                self._rebuild(folder)
                self._reduced.settle()
                self.story.rewind(step)
                self._heard = [one for one in self._heard if rewind.stays(*one, step)]
            else:
                self._counted = self._reduced.last[0] + 1
                step = max(step, self._counted)
            if ranks is not None:
                self._narrow(step, ranks)
            return lost_steps

    # --- inside, under the lock ---------------------------------------------------------------

    @property
    def _reduced(self) -> Reducer:
        with self._lock:
            if self._live is None:
                self._live = self._awake()
            return self._live

    @property
    def _table(self) -> RowTable:
        return self._reduced.table

    @property
    def _logged(self) -> dict[str, LoggedColumn]:
        return self._reduced.logged

    def _fresh(self) -> Reducer:
        return Reducer(*self._shape, joined=self.joined, data_parallel=self.data_parallel)

    def _awake(self) -> Reducer:
        if not self._rests_in.is_dir():
            raise RunError(
                "The rows of this run were on disk, and they are gone.",
                seen=str(self._rests_in),
                next_step="run.save(path) keeps a copy elsewhere",
            )
        try:
            self._rebuild(self._rests_in)
            self._reduced.finish()
        except BaseException:
            self._live = None  # not half of it
            raise
        return self._reduced

    def _cut(self, folder: Path, step: int) -> bool:
        """Drop rows of `step` and later from the disk; False where not all of them are there."""
        if not self.on_disk(folder):
            return False
        writers = {self.engines.index(engine) for engine in self.engines}
        try:
            return rewind.cut(folder, writers, step)
        except OSError as error:
            self.event("note", disk.unwritten(folder, error))
            return False

    def _keep(self, name: str, fields: dict[str, Any]) -> None:
        """Keep an event as long as rows are in memory; of epochs the newest says all."""
        if self._live is None:
            return
        if name == "epoch":
            self._heard = [one for one in self._heard if one[0] != "epoch"]
        self._heard.append((name, fields))
        del self._heard[_FIRST_HEARD:-_MOST_HEARD]

    def _tell_totals(self) -> None:
        if self._live is not None:
            self._live.totals.eval_s = self.story.eval_s
            self._live.totals.pauses = tuple(self.story.pauses)

    def _fold(self) -> None:
        reduced = self._reduced  # read from disk, where it rested, with all that came since
        if not self._queue:
            return
        rows = np.frombuffer(b"".join(self._queue), RECORD)
        self._queue, self._queued_rows = [], 0
        if self._counted:
            rows = rows[rows["step"] >= self._counted]
        reduced.add(rows)
        if note := reduced.health.note:
            about = {"text": note, "topic": Topic.LOSS_LOST, "value": reduced.health.step}
            self.story.fold("note", about, float(rows["end_s"].max(initial=0.0)))

    def _narrow(self, step: int, ranks: Sequence[int]) -> None:
        self._phases.append((step, tuple(ranks)))
        self._reduced.narrow(ranks)

    def _rebuild(self, folder: Path) -> None:
        """Read everything anew from a run's folder but what is told of the run as a whole."""
        self._live = reduced = self._fresh()
        self._tell_totals()
        self._queue, self._queued_rows = [], 0
        for first, end, ranks in rewind.spans(self._phases):
            if ranks is not None:
                reduced.narrow(ranks)
            for rows in rewind.replay(folder, range(len(self.engines)), first, end):
                reduced.add(rows)
        for name, fields in disk.read_events(folder):
            if name == "log":
                self._log(fields, float(fields.get("t_s") or 0.0))

    def _log(self, fields: Mapping[str, Any], t_s: float) -> None:
        step, rank = int(fields.get("step", 0)), int(fields.get("rank", 0))
        for name, value in dict(fields.get("values") or {}).items():
            if name in COLUMNS:
                self.story.fold("note", {"text": f"wb.log: {name} is a column already"}, t_s)
                continue
            if name == "memory_bytes":
                self.story.memory_bytes[rank] = float(value)
            column = self._logged.setdefault(str(name), LoggedColumn())
            column.add(step, rank, t_s, float(value))
