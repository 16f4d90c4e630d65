"""The submitted jobs of this user: `wb.jobs`, stored so that later notebooks have them.

One JSON file per job stores its ticket and, when known, how it ended. All other data is requested
from the platform when the user looks at the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError, PlanError, RunError, unknown
from ..export.folder import read_job
from ..history import disk, folders
from ..views.table import Column, Table
from ..views.text import UNKNOWN, duration
from .platforms import PLATFORMS, JobState, Ticket, platform

if TYPE_CHECKING:
    from ..export.envelopes import Resources

FORMAT = "workbench-submitted/1"
KEEP = 200
LOOK_S = 1.0
"""Shortest time between two requests to a platform for one job."""
MOST_ASKED = 20
"""Number of jobs in a list with fresh data; for older jobs the list shows the last known state."""
SHOWN_LINES = 20
_FILE_BYTES = 1 << 16
_WHY_CHARACTERS = 2000
_WAIT_S = (0.2, 0.5, 1.0, 2.0, 5.0)

Place = str | list[str]
Follow = Callable[["Submitted"], Any]


class Log(str):
    """Lines that a job printed; notebooks show them as lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Submitted:
    """A job on a platform.

    Args:
        name: The name of the job in `wb.jobs`.
        last: The last known state.
        follow: Returns the function that `follow` calls with the job; this function returns the
            run.
        keep: Called when the job must be saved.
    """

    def __init__(
        self, ticket: Ticket, name: str, *, last: JobState | None = None, cancelled: bool = False,
        follow: Callable[[], Follow | None] = lambda: None,
        keep: Callable[[Submitted], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.ticket, self.name, self.cancelled = ticket, name, cancelled
        self.last = last or JobState("unknown", "not asked yet")
        self.answered = True
        self._platform = platform(ticket.platform)
        self._follow, self._keep = follow, keep
        self._asked_at = float("-inf")
        self._end: str | None = None

    @property
    def id(self) -> str:
        """The platform's name or number for the job."""
        return self.ticket.id

    @property
    def platform(self) -> str:
        """The platform: `slurm`."""
        return self.ticket.platform

    @property
    def folder(self) -> Path:
        """The job folder on this machine."""
        return Path(self.ticket.folder)

    @property
    def state(self) -> str:
        """`pending`, `running`, `finished`, `failed`, `cancelled`, or `unknown`."""
        return self.look().state

    @property
    def reason(self) -> str:
        """The reason in the platform's words: `PENDING (Resources)`."""
        return self.look().reason

    def look(self) -> JobState:
        """Ask the platform, at most once a second; a job that is over is not asked for.

        A platform that does not answer makes a job `unknown`; its `reason` says so.
        """
        if self.last.is_over and not self.last.gone:
            return self.last
        if time.monotonic() - self._asked_at < LOOK_S:
            return self.last
        try:
            found, self.answered = self._platform.state(self.ticket), True
        except ClusterError as error:
            words = str(error.seen or "").strip().splitlines()[-1:]
            found = JobState("unknown", " ".join([error.what, *words]), self.last.began_s)
            self.answered = False
        if found.gone and self.cancelled:
            found = JobState("cancelled", found.reason, self.last.began_s)
        self._asked_at, self.last = time.monotonic(), found
        if found.is_over and not found.gone:
            self._keep(self)
        return found

    def logs(self, last: int = 200) -> Log:
        """Return the last lines of the job's output, without its records.

        Raises:
            ClusterError: The platform does not answer.
        """
        return Log(self._platform.logs(self.ticket, last))

    def cancel(self) -> None:
        """End the job at once; `run.stop()` of the followed run ends it after a step.

        Raises:
            ClusterError: The platform refuses, or does not answer.
        """
        if self.look().is_over:
            return
        self._platform.cancel(self.ticket)
        self.cancelled, self._asked_at = True, float("-inf")
        self._keep(self)

    @property
    def place(self) -> Place:
        """The place for `wb.follow`."""
        return self._platform.place(self.ticket)

    def follow(self) -> Any:
        """Return the job's run, with its live dashboard.

        Raises:
            PlanError: This process cannot follow the run.
        """
        follow = self._follow()
        if follow is None:
            raise PlanError(
                "job.follow() does not work in this Python process: the module "
                "workbench.notebook.jobs has not been imported.",
                seen=self.name,
                next_step="run: import workbench as wb; wb.follow(job.place)",
                code="WB-PLAN-244",
            )
        return follow(self)

    def wait(self, timeout: float | None = None) -> Submitted:
        """Wait for the end and return the job.

        Raises:
            ClusterError: The job failed, or its platform no longer knows it.
            TimeoutError: The job did not end within `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        tries = 0
        while not (now := self.look()).is_over:
            pause_s = _WAIT_S[min(tries, len(_WAIT_S) - 1)]
            if end is not None:
                if time.monotonic() >= end:
                    raise TimeoutError(f"job {self.name} is still {now.state} after {timeout} s")
                pause_s = max(0.0, min(pause_s, end - time.monotonic()))
            time.sleep(pause_s)
            tries += 1
        if now.state == "failed" or now.gone:
            raise ClusterError(
                f"{self._called} {self._how(now)}.",
                seen=f"{now.reason}\n{self._last_lines(now)}".strip(),
                next_step=f"wb.jobs[{self.name!r}].logs() shows more"
                if now.state == "failed"
                else f"look for job {self.id} in the platform's own list",
                code="WB-CLUSTER-094",
            )
        return self

    @property
    def _called(self) -> str:
        of = "" if self.name == self.id else f" {self.id}"
        return f"Job {self.name} ({self.platform}{of})"

    def _how(self, now: JobState) -> str:
        if now.state == "failed":
            early = {False: " before its first step", True: " after its first step"}
            return "failed" + early.get(now.stepped, "")  # type: ignore[arg-type]
        if now.gone:
            return "is no longer known to the platform"
        return {"pending": "waits", "running": "runs", "cancelled": "was cancelled",
                "finished": "has finished"}.get(now.state, "is in an unknown state")  # fmt: skip

    def _why(self) -> str:
        """Return the error of a failed job's run; empty if the run is not on this machine."""
        with contextlib.suppress(ClusterError, OSError, TypeError, RunError):
            folder = Path(self.place)  # type: ignore[arg-type]
            if folder.parent.name == "runs":
                return str(disk.read_meta(folder).get("error") or "")[:_WHY_CHARACTERS]
        return ""

    def _last_lines(self, now: JobState) -> str:
        """Return why a job failed, or the end of its log; requested only once."""
        if now.state != "failed":
            return ""
        if self._end is None:
            self._end = self._why() or None
        if self._end is None:
            with contextlib.suppress(ClusterError, OSError):
                self._end = str(self.logs(SHOWN_LINES))
        return self._end or ""

    def row(self, now: JobState) -> list[str]:
        """Return its cells in a table of jobs."""
        since = max(0.0, time.time() - self.ticket.submitted_s)
        # A machine's clock and its processes' times differ by up to a second.
        ran = None if now.began_s is None else min(since, max(0.0, time.time() - now.began_s))
        state = now.state + (" before its first step" if now.stepped is False else "")
        ages = [UNKNOWN if one is None else f"{duration(one)} ago" for one in (since, ran)]
        why = self._why().partition("\n")[0] if now.state == "failed" else ""
        reason = why or (UNKNOWN if now.reason in ("", f"pid {self.id}") else now.reason)
        return [self.name, self.platform, self.id, state, reason, *ages]

    def table(self) -> Table:
        """Return the current state, and for a failed job its last output."""
        now = self.look()
        lines = self._last_lines(now).splitlines()
        if lines and self._why():
            said = lines[1:]  # its first is the reason
        else:
            said = ["End of its output:", *lines] if lines else []
        return Table(COLUMNS, [self.row(now)], notes=[*said, f"Folder: {self.folder}"])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        table = self.table()
        return {"text/html": table.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        now = self.look()
        words = f": {now.reason}" if now.reason else ""
        lines = self._last_lines(now)
        return f"{self._called} {self._how(now)}{words}" + (f"\n{lines}" if lines else "")


COLUMNS = (
    Column("job", "left"), Column("platform", "left"), Column("id", "left"),
    Column("state", "left"), Column("reason", "left", 48), Column("submitted"), Column("began"),
)  # fmt: skip


class Jobs(Mapping[str, Submitted]):
    """All jobs by name, id or position: `jobs["train"]`, `jobs["17"]`, `jobs[-1]` (the newest).

    If a new job has the name of an older job, the older job is renamed to `name@1`. Jobs of other
    notebooks are included.

    Attributes:
        follower: The function that `job.follow()` calls with the job.
        notes: Texts, one for each file that could not be read or written.
    """

    def __init__(self, folder: Callable[[], Path] | None = None) -> None:
        self.follower: Follow | None = None
        self._folder = folder or jobs_root
        self._found: dict[str, Submitted | str] = {}  # or the error, by the file's name
        self._unkept: dict[str, Submitted] = {}  # by the file that could not be written
        self._lock = threading.Lock()
        self._trouble: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Return a module of this package, because in a notebook `workbench.jobs` is this list."""
        try:
            return sys.modules[f"{__package__}.{name}"]
        except KeyError:
            raise AttributeError(f"Jobs has no {name!r}") from None

    def submit(
        self, folder: Path, on: str, resources: Resources, *, name: str = "", **options: str
    ) -> Submitted:
        """Check with the platform whether a job folder can run there, then submit it.

        Args:
            name: The name of the job in `wb.jobs`; by default from its folder.
            options: The options of `platforms.platform`.

        Raises:
            PlanError: The folder is not a job for this platform.
            ClusterError: The platform is missing, lacks a requested resource, or refuses the job.
        """
        chosen = platform(on, **options)
        folder = Path(folder).expanduser()
        name = name or read_job(folder).name
        chosen.check(folder, resources)
        return self.add(chosen.submit(folder, resources), name)

    def add(self, ticket: Ticket, name: str) -> Submitted:
        """Save a submitted job; if that fails, the job stays listed until the kernel ends."""
        file = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        job = self._made(file, ticket, name)
        with self._lock:
            if self._write(file, job):
                self._found[file] = job
                self._prune()
            else:
                self._unkept[file] = job
        return job

    def remove(self, name: str | int) -> None:
        """Forget a job; it continues on its platform."""
        job = self[name]
        with self._lock:
            for file in [one for one, held in self._all().items() if held is job]:
                self._found.pop(file, None)
                self._unkept.pop(file, None)
                with contextlib.suppress(OSError):
                    (self._folder() / file).unlink()

    @property
    def latest(self) -> Submitted | None:
        """The newest job; None if there is none."""
        return next(reversed(self._named().values()), None)

    @property
    def notes(self) -> list[str]:
        """The errors of reading and writing job files."""
        with self._lock:
            self._all()
            return [*self._trouble, *(one for one in self._found.values() if isinstance(one, str))]

    def table(self) -> Table:
        """Return all jobs, the newest last; asks the platforms for jobs that can have changed."""
        jobs = self._named()
        silent: set[str] = set()
        asked, rows = 0, []
        for job in reversed(jobs.values()):
            now = job.last
            if not now.is_over and job.platform not in silent and asked < MOST_ASKED:
                now, asked = job.look(), asked + 1
                if not job.answered:  # the other jobs of this platform would wait as long
                    silent.add(job.platform)
            rows.append(job.row(now))
        return Table(COLUMNS, rows[::-1], "" if rows else "There are no jobs yet.", self.notes)

    # -- files -------------------------------------------------------------------------------------

    def _made(self, file: str, ticket: Ticket, name: str, **known: Any) -> Submitted:
        return Submitted(
            ticket, name, follow=lambda: self.follower, keep=lambda job: self._again(file, job),
            **known,
        )  # fmt: skip

    def _again(self, file: str, job: Submitted) -> None:
        if file in self._found:
            self._write(file, job)

    def _write(self, file: str, job: Submitted) -> bool:
        last = vars(job.last) if job.last.is_over else None
        data = {
            "format": FORMAT, "name": job.name.partition("@")[0], "ticket": job.ticket.to_wire(),
            "last": last, "cancelled": job.cancelled,
        }  # fmt: skip
        fresh = None
        try:
            path = self._folder() / file
            fresh = path.with_name(f".{file}.{os.getpid()}")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
                json.dump(data, stream)
            fresh.replace(path)
            return True
        except OSError as error:
            if fresh is not None:
                with contextlib.suppress(OSError):
                    fresh.unlink()
            self._trouble.append(
                f"Job {job.name} ({job.id}) could not be saved, so only this notebook knows the "
                f"job's state: {error}."
            )
            return False

    def _prune(self) -> None:
        kept = [file for file, job in self._all().items() if isinstance(job, Submitted)]
        for file in kept[:-KEEP]:
            self._found.pop(file, None)
            with contextlib.suppress(OSError):
                (self._folder() / file).unlink()

    def _all(self) -> dict[str, Submitted | str]:
        """Return the jobs by file, the newest last; new and deleted files are noticed."""
        here: list[str] = []
        with contextlib.suppress(OSError):
            here = [one.name for one in self._folder().glob("[0-9]*.json")]
        self._found = {
            file: self._found[file] if file in self._found else self._read(file) for file in here
        }
        return dict(sorted({**self._found, **self._unkept}.items()))

    def _read(self, file: str) -> Submitted | str:
        """Return a saved job, or a sentence about the error in its file."""
        path = self._folder() / file
        try:
            with path.open("rb") as stream:
                data = json.loads(stream.read(_FILE_BYTES))
            if data["format"] != FORMAT:
                raise ValueError(f"format {str(data['format'])[:40]}")
            ticket = Ticket.from_wire(data["ticket"])
            if ticket.platform not in PLATFORMS:
                raise ValueError(f"no platform {ticket.platform[:40]}")
            last = JobState(**data["last"]) if data["last"] else None
            name, cancelled = str(data["name"]), bool(data["cancelled"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return (
                f"{path} cannot be read, so its job is not in the list: {type(error).__name__} "
                f"{str(error)[:100]}."
            )
        return self._made(file, ticket, name, last=last, cancelled=cancelled)

    def _named(self) -> dict[str, Submitted]:
        """Return the jobs by name; if several have one name, the newest keeps the plain name."""
        with self._lock:
            jobs = [one for one in self._all().values() if isinstance(one, Submitted)]
        groups: dict[str, list[Submitted]] = {}
        for job in jobs:
            groups.setdefault(job.name.partition("@")[0], []).append(job)
        for name, group in groups.items():
            for number, job in enumerate(group[:-1], 1):
                job.name = f"{name}@{number}"
            group[-1].name = name
        return {job.name: job for job in jobs}

    # -- a mapping ---------------------------------------------------------------------------------

    def __getitem__(self, name: str | int) -> Submitted:
        found = self._named()
        if isinstance(name, int):
            if -len(found) <= name < len(found):
                return list(found.values())[name]
        elif isinstance(name, str):
            if name in found:
                return found[name]
            of_id = [job for job in found.values() if job.id == name]
            if of_id:
                return of_id[-1]
        raise MissingJobError(name, list(found))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._named()

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._named())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        table = self.table()
        if not table.rows:
            return {"text/plain": "\n".join(["There are no jobs yet.", *table.notes])}
        return {"text/html": table.html(), "text/plain": table.text()}

    def __repr__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]


class MissingJobError(KeyError, PlanError):
    """There is no job with this name."""

    def __init__(self, name: object, names: list[str]) -> None:
        if isinstance(name, str) and names:
            told = unknown("job", name, names)
        else:
            told = PlanError(
                "There is no such job." if names else "There is no job yet.",
                seen=name,
                allowed=f"a name: {', '.join(names)}; an id; or a position (-1: the newest job)"
                if names
                else None,
                next_step="wb.jobs shows all jobs"
                if names
                else 'submit a job, for example: wb.submit(plan, on="slurm")',
                code="WB-PLAN-245",
            )
        PlanError.__init__(self, told.what, code=told.code, seen=told.seen, allowed=told.allowed,
                           next_step=told.next_step)  # fmt: skip

    def __str__(self) -> str:
        return str(self.args[0])


def jobs_root() -> Path:
    """Create the folder of job files next to that of the runs, for this user only; return it."""
    root = folders.runs_root()
    # Other users share the temporary folder, so a folder next to ours can belong to another user.
    root = root / "jobs" if folders.moved() else root.parent / "jobs"
    root.mkdir(mode=0o700, exist_ok=True)
    return root


jobs = Jobs()
