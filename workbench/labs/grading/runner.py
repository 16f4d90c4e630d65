"""The process that grades one notebook: it reads, merges and runs it, and settles every exercise.

It gets its task as JSON on standard input, and writes its results to standard output, one line each
time that it knows more.

The lab is run with a student's answers. If a cell broke it, it is run again, until every exercise
is settled.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from . import processes
from .isolation import NOTHING, Isolation, remove
from .link import Gone, KernelLink, Reply, look_at
from .processes import STEP_S, Limits
from .reading import Book, Item, Merged, Unreadable, definitions, merge, read
from .results import OVER, Graded, Outcome, from_wire

_WATCH_PARENT_S = 1.0


def grade(
    path: Path,
    canonical: Path | None,
    notebooks: Path,
    folder: Path,
    limits: Limits,
    *,
    until: float,
    earlier: Mapping[str, Any] | None = None,
    tell: Tell = lambda graded, running: None,
    isolation: Isolation = NOTHING,
) -> Graded:
    """Grade one notebook.

    Args:
        canonical: The lab as it was handed out; by default found in `notebooks`.
        folder: For its kernels; private, and removed by the supervisor.
        until: When it must have ended, by `time.monotonic`.
        earlier: The results of another runner that one of the notebook's cells ended.
        tell: Called with the results so far, and the exercise whose cells run next.
    """
    began = time.monotonic()
    graded = Graded(str(path), versions=versions())
    try:
        merged = _prepare(path, canonical, notebooks, graded)
    except Unreadable as why:
        graded.problems.append(str(why))
        return graded
    if earlier is not None:
        known = from_wire(earlier)
        graded.outcomes, graded.problems = known.outcomes, known.problems
        graded.restarts = known.restarts + 1
    tell(graded, "")
    Grading(merged, graded, folder, limits, until, tell, isolation).run()
    graded.seconds = time.monotonic() - began
    return graded


def _prepare(path: Path, canonical: Path | None, notebooks: Path, graded: Graded) -> Merged:
    handed_in = read(path)
    graded.lab = handed_in.lab if handed_in.lab is not None else handed_in.guessed_lab()
    if canonical is None:
        if graded.lab is None:
            raise Unreadable(
                "The notebook belongs to no lab: there is no lab number in its metadata, and no "
                "cell has a line such as `# YOUR CODE 1.2`."
            )
        canonical = notebooks / f"lab_{graded.lab}.ipynb"
        if not canonical.is_file():
            raise Unreadable(f"The notebook belongs to lab {graded.lab}, but there is no such lab.")
    lab = lab_of(canonical)
    wanted = lab.lab if lab.lab is not None else lab.guessed_lab()
    merged = merge(lab, handed_in)
    if wanted != graded.lab and len(merged.untouched) == len(merged.exercises):
        theirs = "no lab" if graded.lab is None else f"lab {graded.lab}"
        raise Unreadable(f"The notebook belongs to {theirs}, but lab {wanted} is being graded.")
    graded.lab = wanted
    graded.outcomes = [Outcome(number) for number in merged.exercises]
    graded.notes = merged.notes
    return merged


def versions() -> dict[str, str]:
    """Return the versions on which a result depends."""
    found = {"python": sys.version.split()[0]}
    for name in ("distributed-workbench", "torch", "tensorflow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def lab_of(path: Path) -> Book:
    """Return the original lab, and check that it can be used.

    Raises:
        Unreadable: It is not a lab.
    """
    lab = read(path)
    if lab.version == "solved":  # an empty notebook would get the solutions
        raise Unreadable(
            f"The original lab must be a notebook for students, but {path.name} contains the "
            "solutions."
        )
    if not any(cell.check for cell in lab.cells):
        raise Unreadable(
            "The original lab must be a notebook that `workbench labs` made for students, but "
            f"{path.name} has no checks."
        )
    return lab


def _end_with(parent: int, folder: Path) -> None:
    """End all processes and ourselves when the process that started us has ended."""
    while os.getppid() == parent:
        time.sleep(_WATCH_PARENT_S)
    processes.starting.acquire()  # never released: no other kernel is started
    processes.end(lambda: processes.below(os.getpid()))
    for _ in range(100):
        remove(folder)
        if not folder.exists():  # else the main thread was about to make a kernel's
            break
        time.sleep(0.05)
    os._exit(1)


def main() -> None:
    """Grade the notebook that standard input names."""
    given = json.loads(sys.stdin.readline())
    processes.adopt()
    processes.hide()  # a cell could write to our standard output, and be taken for us
    ending = (given["parent"], Path(given["folder"]))
    ender = threading.Thread(target=_end_with, args=ending, daemon=True)
    ender.start()
    try:
        _grade(given)
    finally:
        if os.getppid() != given["parent"]:
            ender.join()  # nobody reads our output: it cleans up and ends us


def _grade(given: dict[str, Any]) -> None:
    canonical = given["canonical"]
    graded = grade(
        Path(given["path"]), None if canonical is None else Path(canonical),
        Path(given["notebooks"]), Path(given["folder"]), Limits(**given["limits"]),
        until=given["until"], earlier=given["earlier"], tell=_tell,
        isolation=Isolation(**given["isolation"]),
    )  # fmt: skip
    _tell(graded, OVER)


def _tell(graded: Graded, running: str) -> None:
    sys.stdout.write(json.dumps({"running": running, **graded.to_wire()}) + "\n")
    sys.stdout.flush()


MOST_NAMES = 20
Tell = Callable[[Graded, str], None]


class _Again(Exception):
    """The kernel must be restarted, without the cells of an exercise."""


class _Enough(Exception):
    """Nothing more can be graded."""


class Grading:
    """One notebook's lab, run until every exercise is settled.

    Args:
        graded: Its outcomes are filled in; those that another runner has settled stay.
        folder: The folder for its kernels, each in its own folder.
        until: When it must have ended, by `time.monotonic`.
        tell: Called with the results, and the exercise whose cells run next, in case they end
            this process.
    """

    def __init__(
        self,
        merged: Merged,
        graded: Graded,
        folder: Path,
        limits: Limits,
        until: float,
        tell: Tell,
        isolation: Isolation = NOTHING,
    ) -> None:
        self._merged, self._graded, self._folder, self._limits = merged, graded, folder, limits
        self._deadline, self._tell, self._isolation = until, tell, isolation
        self._outcomes = {one.exercise: one for one in graded.outcomes}
        states = {number: one.state for number, one in self._outcomes.items()}
        self._open = [number for number, state in states.items() if state == "not graded"]
        self._left_out = {number for number, state in states.items() if state == "stopped"}
        # of these, the exercises whose definitions are not run either
        self._undefined = set(self._left_out)
        self._ran: list[str] = []  # exercises whose cells ran in this kernel, in order
        self._engines = 0
        self._lost_by = ""  # the exercise whose cells left fewer engines or files
        self._lost = ""  # what its cells did

    def run(self) -> None:
        """Settle every exercise, or say why not."""
        try:
            while self._open:
                self._pass()
                self._graded.restarts += bool(self._open)
        except _Enough as why:
            for number in self._open:
                one = self._outcomes[number]
                one.state, one.error = "not graded", f"not reached: {why}"
            self._graded.problems.append(f"Some exercises were not graded: {why}.")

    def _pass(self) -> None:
        self._ran, self._engines, self._lost_by = [], 0, ""
        folder, mark = self._kernel_folder(), self._folder.name
        link = KernelLink(folder, self._graded.lab or 0, mark, self._limits, self._deadline,
                    self._isolation)  # fmt: skip
        try:
            self._begin(link)
            with contextlib.suppress(_Again):
                for item in self._merged.items:
                    if self._open:
                        self._check_time()
                        getattr(self, f"_{item.kind}")(link, item)
        finally:
            link.end()
            self._clear()

    def _kernel_folder(self) -> Path:
        """Return a new folder whose name no cell can guess.

        An error ends this process; the supervisor starts another one, with another folder.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a cell may have removed it
        return Path(tempfile.mkdtemp(prefix="", dir=self._folder))

    def _clear(self) -> None:
        """Remove all files, so that those of one kernel do not count for the next."""
        with contextlib.suppress(OSError):
            for one in list(self._folder.iterdir()):
                remove(one)

    def _begin(self, link: KernelLink) -> None:
        try:
            titles = link.begin()
        except Gone as gone:
            raise _Enough(f"the notebook's kernel did not start: {gone}") from None
        for number, one in self._outcomes.items():
            one.title = titles.get(number, one.title)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise _Enough(f"the notebook reached its time limit of {self._limits.total_s:g} s")

    # -- the lab's steps ---------------------------------------------------------------------------

    def _step(self, link: KernelLink, item: Item) -> None:
        try:
            reply = link.run(item.sources[0], max(self._limits.cell_s, STEP_S))
            after = link.ask("after_step").answer or {}
            link.remember(after.get("runs"))
        except Gone as gone:
            self._fell(item, str(gone))
        if reply.interrupted or reply.error:
            self._check_time()
            self._without_the_loser("")
            why = "the cell took too long" if reply.interrupted else reply.error.partition("\n")[0]
            self._problem(f"The lab's cell {item.place} failed: {why}")
        self._engines = _count(after, 0)
        if not self._ran or "begin(" in item.sources[0] or "%cluster" in item.sources[0]:
            link.workers = self._engines

    def _problem(self, words: str) -> None:
        if words not in self._graded.problems:
            self._graded.problems.append(words)

    def _fell(self, item: Item, why: str) -> NoReturn:
        """The kernel ended in a step or a check: an earlier cell must have caused that."""
        self._check_time()
        if self._left_out - self._undefined:  # a function of theirs may have been called
            self._undefined |= self._left_out
            self._begin_again()
        mine = [item.exercise] if item.kind == "check" else []
        suspects = [n for n in [*mine, *reversed(self._ran)] if n not in self._left_out]
        if not suspects:
            raise _Enough(
                f"the lab's cell {item.place} failed before the first exercise's cell ran: {why}"
            )
        if item.kind == "step":
            why = f"the lab's cell {item.place}, which runs after the exercise, failed: {why}"
        self._stop(suspects[0], why)

    def _stop(self, number: str, why: str) -> NoReturn:
        """An exercise has ended the kernel: continue without its cells."""
        outcome = self._outcomes[number]
        if number in self._open:
            self._settle(number, "stopped", why)
        elif outcome.passed:  # it was right, but ended the kernel later
            outcome.state, outcome.error = "stopped", why
        self._leave_out(number)

    def _leave_out(self, number: str) -> NoReturn:
        """Leave out an exercise's cells from now on, at first except for their definitions."""
        if number in self._left_out:
            self._undefined.add(number)
        self._left_out.add(number)
        self._begin_again()

    def _begin_again(self) -> NoReturn:
        """Begin again, if an exercise is open."""
        if self._open and self._graded.restarts >= self._limits.restarts:
            most = self._limits.restarts
            raise _Enough(f"the notebook's kernel reached its limit of {most} restarts")
        raise _Again

    def _without_the_loser(self, number: str) -> None:
        """Begin again if cells of another exercise have cost engines that are needed here."""
        lost_by = self._lost_by
        if lost_by and lost_by != number and lost_by not in self._left_out:
            self._problem(f"Exercise {lost_by} {self._lost} that later cells need. "
                          "The lab was run again without this exercise.")  # fmt: skip
            self._leave_out(lost_by)

    # -- exercises ---------------------------------------------------------------------------------

    def _settle(self, number: str, state: Any, error: str = "") -> None:
        outcome = self._outcomes[number]
        outcome.state, outcome.error = state, error or outcome.error
        if number in self._open:
            self._open.remove(number)
        self._tell(self._graded, "")

    def _answer(self, link: KernelLink, item: Item) -> None:
        number, outcome = item.exercise, self._outcomes[item.exercise]
        is_open = number in self._open
        left_out = number in self._left_out
        if is_open:  # it may have run before, in a kernel that was given up
            outcome.begin_anew()
        if not left_out:
            self._tell(self._graded, number)
        try:
            for source in self._without(item) if left_out else item.sources:
                reply = link.run(source, self._limits.cell_s)
                self._check_time()  # else the notebook's time would be taken for the cell's
                if is_open:
                    self._take(outcome, reply)
                    lab = int(number.partition(".")[0])
                    outcome.look_at += [
                        one for one in look_at(source, lab) if one not in outcome.look_at
                    ]
            self._mended(link.ask("mend"), number if is_open else "")
        except Gone as gone:
            self._check_time()
            self._stop(number, str(gone))
        if not left_out:
            self._ran.append(number)
        self._check_time()

    def _without(self, item: Item) -> list[str]:
        """Return what runs in place of an answer that is left out."""
        if item.exercise in self._undefined:
            return [item.stub]
        defined = [source for source in map(definitions, item.sources) if source]
        if not defined:
            self._undefined.add(item.exercise)
        return [item.stub, *defined]

    @property
    def _too_long(self) -> str:
        return f"the code took longer than {self._limits.cell_s:g} s and was interrupted"

    def _take(self, outcome: Outcome, reply: Reply) -> None:
        outcome.seconds += reply.seconds
        if reply.interrupted:
            outcome.error = self._too_long
            outcome.state = "stopped"
        elif reply.error and not outcome.error:
            outcome.error = reply.error

    def _mended(self, reply: Reply, number: str) -> None:
        answer = reply.answer or {}
        if number:
            put_back = answer.get("put_back")
            said = [str(one) for one in put_back] if isinstance(put_back, list) else []
            self._outcomes[number].put_back += said[:MOST_NAMES]
        engines, before = _count(answer, self._engines), self._engines
        self._engines = engines
        is_less = engines < before or answer.get("removed") is True
        if is_less and number and not self._lost_by:
            self._lost_by = number
            self._lost = "ended engines" if engines < before else "removed files"

    def _check(self, link: KernelLink, item: Item) -> None:
        number = item.exercise
        if number not in self._open:
            return
        outcome = self._outcomes[number]
        try:
            reply = link.check(number, self._limits.cell_s)
        except Gone as gone:
            self._fell(item, f"in its check, {gone}")
        self._check_time()
        answer = reply.answer or {}
        words = f"The check failed: {answer.get('failed') or 'there was no report'}."
        nothing = {"findings": [{"right": False, "words": words, "hint": ""}]}
        report = answer.get("report") or nothing
        passed = report.get("passed") is True and not reply.interrupted
        if not passed:
            self._without_the_loser(number)
        self._mended(reply, number)
        outcome.seconds += reply.seconds
        outcome.findings = report["findings"]
        if outcome.state == "stopped":
            self._settle(number, "stopped")
        elif reply.interrupted:
            self._settle(number, "stopped", f"in its check, {self._too_long}")
        elif number in self._merged.untouched:  # never right, even if a check passes it
            self._settle(number, "untouched")
        else:
            self._settle(number, "right" if passed else "wrong")


def _count(answer: dict[str, Any], default: int) -> int:
    found = answer.get("engines", default)
    return found if type(found) is int else default


if __name__ == "__main__":
    main()
