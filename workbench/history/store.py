"""A run's history: rows from all ranks in, columns, exact totals and snapshots out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..lifecycle import OVER
from ..protocol import Topic
from ..record import RARE
from . import columns, disk, views
from .blame import Waits
from .intake import Intake
from .logged import LoggedColumn
from .reducer import Rows
from .snapshot import Snapshot
from .table import unreduced
from .totals import Totals

if TYPE_CHECKING:
    import pandas as pd


class RunHistory(Intake, Mapping[str, NDArray[Any]]):
    """One row per worker and step, in bounded memory.

    All methods may be called from any thread. A history that rests (`rest`) keeps its rows on disk
    only, and reads them again when somebody asks for them.

    Args:
        ranks: Engine ids by rank.
        memory_limit_bytes: Bound of the stored rows; beyond it whole steps are dropped evenly,
            `stride` says so and `totals` stays exact.
        clock: Time of events that do not bring their own.
        joined: Whether ranks take each step together. Asynchronous strategies' rows stand alone.
        data_parallel: Whether workers take shares of the batch; else all see the same samples.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        with self._lock:
            self._fold()
            hidden = {name for name in RARE if self._reduced.curves[name].empty}
            return (*(c for c in columns.COLUMNS if c not in hidden), *self._logged)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return one column, ordered by step and rank, as a fresh array of shape (rows,)."""
        with self._lock:
            if name not in self.columns:
                raise KeyError(f"{name!r}; columns: {', '.join(self.columns)}")
            return columns.column(name, self._reduced, self.engines)[self._table.order()]

    def together(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return columns as they are at one moment: of equal length also while rows come in.

        A column that this history does not have is NaN throughout.
        """
        with self._lock:
            rows = len(self)
            return {n: self[n] if n in self.columns else np.full(rows, np.nan) for n in names}

    def __len__(self) -> int:
        """Number of stored rows."""
        with self._lock:
            self._fold()
            return len(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        kept = f", every {self.stride}th step kept" if self.stride > 1 else ""
        return f"RunHistory({len(self)} rows, {len(self.engines)} workers{kept})"

    @property
    def stride(self) -> int:
        """Every how many-th step is stored; 1 for all."""
        return self._table.stride

    @property
    def invalid_rows(self) -> int:
        """Rows that named a rank the run does not have, and were left out."""
        with self._lock:
            self._fold()
            return self._reduced.invalid_rows

    @property
    def totals(self) -> Totals:
        """A copy of the exact sums over all rows received, whatever `stride` is."""
        with self._lock:
            self._fold()
            return copy.deepcopy(self._reduced.totals)

    @property
    def unmeasured(self) -> dict[str, str]:
        """Columns that hold no value, with the reason."""
        with self._lock:
            self._fold()
            names = self.columns if len(self._table) else ()
            empty = columns.empty(names, self._reduced, self.engines)
            unknown = "not measured by this strategy"
            return {name: self.story.unmeasured.get(name) or unknown for name in empty}

    @property
    def evals(self) -> list[dict[str, Any]]:
        """One mapping per evaluation: step, epoch, then the metrics."""
        with self._lock:
            return [dict(one) for one in self.story.evals]

    def since(self, last: NDArray[np.int64]) -> Rows:
        """Return the stored rows of steps beyond `last[rank]`, ordered by step and rank.

        Returns:
            Fresh `table.STORED` rows; `start_s` counts from the run's beginning, as in the columns.
        """
        with self._lock:
            self._fold()
            rows = self._table.since(last)
            rows["start_s"] -= self._reduced.origin_s()[rows["rank"]]
            return rows

    def logged_since(
        self, last: Mapping[str, NDArray[np.int64]]
    ) -> dict[str, list[tuple[int, int, float]]]:
        """Return what `wb.log` added beyond step `last[name][rank]`: step, rank, value by name."""
        none = np.full(len(self.engines), -1)
        with self._lock:
            return {name: one.since(last.get(name, none)) for name, one in self._logged.items()}

    def logged_at(self, rows: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
        """Return the values of `wb.log` at some `(step, rank)`; NaN where none was logged."""
        with self._lock:
            return {name: column.at(rows) for name, column in self._logged.items()}

    @property
    def origin_s(self) -> float:
        """When the first step began, on the clock of events; NaN before it did."""
        with self._lock:
            self._fold()
            first = self._reduced.totals.first_s
            return float(first.min()) if np.isfinite(first).any() else float("nan")

    def to_pandas(self) -> pd.DataFrame:
        """Return all columns as a pandas DataFrame, a row per worker and step."""
        import pandas as pd

        with self._lock:
            return pd.DataFrame({name: self[name] for name in self.columns})

    def write(self, folder: Path) -> None:
        """Write what is in memory to a folder, as the engines write it where a disk has room.

        What could not be measured stays NaN. Of a run so long that memory keeps every second step,
        or fewer, those are written, and a note says so.

        Raises:
            OSError: It cannot be written there.
        """
        with self._lock:
            self._fold()
            rows = unreduced(self._table, self._phases, skewed=self._reduced.skewed)
            events = [event for one in self._heard if (event := _of_copy(*one)) is not None]
            events += _logged_events(self._logged, rows)
            if self.stride > 1:
                text = (
                    f"This copy has every {self.stride}th step: the run could not be written to "
                    "disk while it went on, and memory holds no more of it."
                )
                events.append(("note", {"text": text}))
        for rank in range(len(self.engines)):
            writer = disk.RunWriter(folder, rank)
            try:
                writer.append_records(rows[rows["rank"] == rank].tobytes())
                for name, fields in events if rank == 0 else ():
                    writer.append_event(name, fields)
            finally:
                writer.close()

    def snapshot(
        self,
        *,
        name: str = "",
        strategy: str = "",
        framework: str = "torch",
        state: str = "running",
        dropped: int = 0,
        plot_cpu: float = float("nan"),
    ) -> Snapshot:
        """Return what a view needs, copied; about 0.3 ms for 4 workers.

        Args:
            name, strategy, framework, state: Of the run; state is one of `lifecycle.State`.
            dropped: Records lost on the way.
            plot_cpu: Share of one core that drawing took.
        """
        with self._lock:
            self._fold()
            label = views.Label(name, strategy, framework, state, dropped, plot_cpu)
            whole = self._straggler() if state in OVER else None
            return views.take(self._parts(), label, whole)

    def _straggler(self) -> tuple[int | None, float, int]:
        """Return who held the others up in the run as a whole, as `Blame.worst` has it."""
        rows = len(self._table)
        if self._slow is None or self._slow[0] != rows:
            waits = Waits.of(self)
            rank = waits.culprit(len(self.engines))
            caused = waits.waited_s[waits.blamed == rank] if rank is not None else np.zeros(1)
            steps = len(np.unique(waits.step))
            self._slow = rows, (rank, float(np.nanmedian(caused)), steps)
        return self._slow[1]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.columns)

    def _parts(self) -> views.Sources:
        reduced = self._reduced
        logged = {name: column.envelope for name, column in self._logged.items()}
        return views.Sources(
            self.engines, self.data_parallel, reduced.totals, reduced.recent, reduced.curves,
            logged, self.story, reduced.origin_s(), *reduced.last,
        )  # fmt: skip


def _of_copy(name: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return an event as a whole copy has it; None where it is of no account there."""
    if Topic.of(fields.get("topic")) is Topic.NOT_ON_DISK:  # the copy is
        fields = {key: value for key, value in fields.items() if key not in ("topic", "value")}
    return (name, dict(fields)) if name != "post" else None


def _logged_events(
    logged: Mapping[str, LoggedColumn], rows: Rows
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `wb.log` added as events; their times are those at which the steps began."""
    ranks = int(rows["rank"].max(initial=0)) + 1
    for name, column in logged.items():
        for step, rank, value in column.since(np.full(ranks, -1)):
            at = min(int(np.searchsorted(rows["step"], step)), len(rows) - 1)
            t_s = float(rows["start_s"][at])
            yield "log", {"rank": rank, "step": step, "values": {name: value}, "t_s": t_s}
