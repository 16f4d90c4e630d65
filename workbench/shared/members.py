"""The members of a cell or a run, and the names of engines in outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Member:
    """One engine's part; as text it is `rank 1`, `replicas 0-3` or `server s0`.

    Attributes:
        role: A `worker` is one rank; `replicas` are all workers of a run on one engine; a `helper`
            runs no cell: a server, or a worker that a coordinator calls.
        first, last: Its ranks; without meaning for a helper.
        part: The name of a helper.
        device: The device of a worker or replicas; empty if it should not be shown.
        host: Its host; empty on the notebook's machine.
    """

    role: Literal["worker", "replicas", "helper"] = "worker"
    first: int = 0
    last: int = 0
    part: str = ""
    device: str = ""
    host: str = ""

    @staticmethod
    def of_ranks(first: int, last: int | None = None, device: str = "") -> Member:
        """Return the member with one rank, or with all ranks from the first to the last."""
        if last is None or last == first:
            return Member("worker", first, first, device=device)
        return Member("replicas", first, last, device=device)

    @staticmethod
    def helper(part: str) -> Member:
        """Return a member that runs no cell."""
        return Member("helper", part=part)

    def __str__(self) -> str:
        if self.role == "helper":
            return self.part
        return f"rank {self.first}" if self.role == "worker" else f"replicas {self._span}"

    @property
    def _span(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def title(self) -> str:
        """Its name at the beginning of a sentence: `Rank 1`."""
        return str(self)[:1].upper() + str(self)[1:]

    @property
    def heading(self) -> str:
        """The title of its output: `rank 1 · cuda:0`, with its host if that is another machine."""
        return " · ".join(filter(None, [str(self), self.host, self.device]))

    @property
    def is_on_device(self) -> bool:
        """Whether it computes on a device other than the CPU."""
        return self.device not in ("", "cpu")

    @property
    def verb(self) -> str:
        """`is`, or `are` of replicas."""
        return "are" if self.role == "replicas" else "is"

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return dict(self.__dict__)

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Member:
        """Rebuild what `to_wire` gave."""
        return Member(**data)


def called(members: Iterable[Member]) -> str:
    """Return engines as `rank 1`, `ranks 0, 2-3`, or one by one: `rank 0, server s0`."""
    members = list(members)
    if not all(member.role == "worker" for member in members):
        return ", ".join(map(str, members))
    return f"rank{'s' if len(members) > 1 else ''} {ranges(member.first for member in members)}"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges: `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
