"""The place of a followed run: a folder, a host that ssh reaches, or printed lines.

For each place, `Place.folder` is a run folder on this machine. It is the folder of the run, or a
mirror of it to which `refresh` appends new data (`frames`). No thread is started. The follower
calls `refresh`, which reads the available data and never waits for more.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from ..errors import PlanError, RunError, nearest
from ..history import folders
from . import control as orders
from .frames import (
    LINE_BYTES,
    LOOK_S,
    MARK,
    NAMES,
    REFRESH_BYTES,
    WHOLE_BYTES,
    LineWriter,
    Mirror,
    Process,
    far_source,
    found,
    is_over,
    plain,
)

if TYPE_CHECKING:
    from .control import Order

__all__ = [
    "FolderPlace", "LineWriter", "LinesPlace", "Mirror", "Place", "SshPlace", "open_place",
]  # fmt: skip

LOG = "log.txt"
LOG_BYTES = 10 << 20
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0)
FRUITLESS = 20
ANSWER_S = 5.0
CONNECT_S = 20.0
CONTROL_S = 20.0
SSH_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2",
    "-o", "ConnectTimeout=8",
)  # fmt: skip
_MARKED = (MARK + "{").encode()


class Place(Protocol):
    """The place of a followed run.

    Attributes:
        folder: A run folder on this machine; for a job that has not begun, its future run folder.
        where: The place in words.
        problem: Why data no longer arrives, or only part of it; "" if there is no problem.
        over: Nothing more will come.
    """

    folder: Path
    where: str

    @property
    def problem(self) -> str: ...

    @property
    def over(self) -> bool: ...

    def refresh(self) -> None:
        """Fetch new data; takes at most about `LOOK_S`."""

    def send(self, order: Order) -> None:
        """Send the run a signed order; RunError if that is not possible."""

    def close(self) -> None:
        """Close the place; can be called twice."""


def open_place(
    place: str | os.PathLike[str] | Sequence[str],
    *,
    run: str = "",
    control: Sequence[str] | None = None,
    ssh: Sequence[str] = ("ssh",),
) -> Place:
    """Open the place of a run.

    Args:
        place: A run folder or a job folder; `ssh://[user@]host[:port]/abs/dir`; or a command whose
            output has marked lines, as a list, or a string whose first word is a program.
        run: For a job folder, the number of the run; by default the newest run.
        control: For a command: another command that takes orders as lines of JSON on its stdin.
            `{dir}` in it is the run folder on the other side. `kubectl logs` does not need it.
        ssh: The ssh command.

    Raises:
        PlanError: It is not a place.
        RunError: There is no run at the place, or the place cannot be reached.
    """
    if isinstance(place, os.PathLike):
        return FolderPlace(os.fspath(place), run)
    if isinstance(place, str):
        if place.startswith("ssh://"):
            return SshPlace(place, run, ssh)
        scheme = re.match(r"[a-z0-9+.-]+://", place)
        words = [] if scheme else _words_of(place)
        if len(words) > 1 and not os.path.lexists(place) and shutil.which(words[0]):
            return LinesPlace(words, control)
        if words:
            return FolderPlace(place, run)
    elif isinstance(place, Sequence) and place and all(isinstance(one, str) for one in place):
        return LinesPlace(list(place), control)
    raise PlanError(
        "Workbench cannot follow a run at this place.",
        seen=place,
        allowed="a folder, ssh://[user@]host[:port]/folder, or a command as a list of words",
        code="WB-PLAN-239",
    )


def _words_of(place: str) -> list[str]:
    try:
        return shlex.split(place)
    except ValueError:  # a quotation mark in the name of a folder
        return [place]


_WRONG = {
    "nowhere": ("There is no folder and no job with this name.", "check the path"),
    "none": (
        "There is no such folder.",
        "check the path; it must exist on the given host",
    ),
    "closed": ("The folder cannot be read.", "log in as the user who started the job"),
    "empty": (
        "The folder is empty, so it is neither a run nor a job.",
        "give the folder of a job or of a run",
    ),
    "other": ("The folder is neither a run nor a job.", "give a folder with a run.json"),
    "absent": (
        "The job has no run with this number.",
        "if you want the newest run, remove the number",
    ),
    "gone": ("The folder of the run no longer exists.", "follow the job again"),
    "shrank": (
        "The files of the run became shorter, probably because the run was started again.",
        "follow the job again",
    ),
}


def nowhere(place: str, jobs: Sequence[str] = ()) -> RunError:
    """Return the error for a place that is neither a folder nor one of `jobs`."""
    path = os.path.abspath(os.path.expanduser(place))
    above, beside = os.path.dirname(path), []
    with contextlib.suppress(OSError, ValueError), os.scandir(above) as entries:
        folders_there = (one.name for one in itertools.islice(entries, 1000) if one.is_dir())
        beside = [one for one in folders_there if not found(os.path.join(above, one), "")[1]]
    allowed = f"a run folder{', a job folder or a submitted job' if jobs else ' or a job folder'}"
    allowed += f". Folders of runs and jobs in {above}: {', '.join(sorted(beside)[:20]) or 'none'}"
    allowed += f". Submitted jobs: {', '.join(jobs[-20:])}" if jobs else ""
    guess = nearest(os.path.basename(path), [*beside, *jobs])
    return _not_there("nowhere", path, allowed, f"did you mean {guess!r}?" if guess else "")


def _not_there(why: str, where: str, allowed: str | None = None, step: str = "") -> RunError:
    what, usual = _WRONG.get(why, _WRONG["none"])
    return RunError(what, seen=where, allowed=allowed, next_step=step or usual, code="WB-RUN-112")


class FolderPlace:
    """A run folder, or the newest run of a job folder, on a file system of this machine."""

    def __init__(self, folder: str, run: str = "") -> None:
        self._top, self._run = os.path.abspath(os.path.expanduser(folder)), run
        self.where, self.problem, self.over, self._looked_s = self._top, "", False, 0.0
        there, wrong = found(self._top, run)
        if wrong:
            raise nowhere(folder) if wrong == "none" else _not_there(wrong, self._top)
        self._begun, self._mark = bool(there), (0, 0, 0)
        self.folder = Path(there or os.path.join(self._top, "runs", "1"))

    def refresh(self) -> None:
        """Check whether the run has begun, and whether it is over."""
        now = time.monotonic()
        if self.over or now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        if not self._begun:
            there, wrong = found(self._top, self._run)
            self.problem, self._begun = _WRONG[wrong][0] if wrong else "", bool(there)
            self.folder = Path(there) if there else self.folder
        if self._begun:
            try:
                with (self.folder / "run.json").open("rb") as file:
                    about = os.fstat(file.fileno())
                    mark = (about.st_mtime_ns, about.st_size, about.st_ino)
                    if mark != self._mark:
                        self._mark, self.over = mark, is_over(file.read(WHOLE_BYTES))
                self.problem = ""
            except OSError:
                self.problem = "" if self.folder.is_dir() else _WRONG["gone"][0]

    def send(self, order: Order) -> None:
        """Put an order into the run's inbox."""
        orders.give(self.folder, order)

    def close(self) -> None:
        """Do nothing, because this place holds nothing open."""


class _Streamed:
    """A place whose data a program prints; the program is started again until the run is over.

    Args:
        where: The place in words.
        name: The name of the mirror.
        skips: The `skips` argument of `Mirror`.
    """

    def __init__(self, where: str, name: str, *, skips: bool) -> None:
        self.where, self.over = plain(where, 200), False
        self.folder = folders.new_run_dir(name)
        if not self.folder.is_dir():
            raise RunError(
                "The folder for a copy (mirror) of the run cannot be created.",
                seen=str(self.folder.parent),
                next_step="if the disk is full, delete some files; if not, set the environment "
                f"variable {folders.HOME_VARIABLE} to another folder",
                code="WB-RUN-113",
            )
        with contextlib.suppress(OSError):
            folders.mark(self.folder)
        self._mirror = Mirror(self.folder, skips=skips)
        self._process: Process | None = None
        self._waiting: list[bytes] = []  # lines for the next time
        self._lock = threading.RLock()
        self._again_s, self._tries, self._lost, self._closed = 0.0, 0, "", False
        self.refused = 0

    @property
    def problem(self) -> str:
        """Why data no longer arrives, or only part of it."""
        return self._lost or ("some output lines are missing" if self._mirror.missing else "")

    def refresh(self) -> None:
        """Fetch new data."""
        with self._lock:
            if self.over or self._closed:
                return
            if self._process is None:
                if time.monotonic() < self._again_s:
                    return
                try:
                    self._process = self._start()
                except OSError as error:
                    return self._wait_to_start(f"the command cannot be started: {error.strerror}")
            process = self._process
            try:
                self._take_some(process)
                self._settle()
            except OSError as error:
                self._give_up(f"The copy (mirror) of the run cannot be written: {error.strerror}.")
            if self._mirror.full:
                self._give_up("The copy (mirror) of the run has reached its maximum size.")
            if process.ended and not self._waiting and not self.over:
                words = process.close()
                self._process = None
                self._ended(words, process.code)
            if self.over:
                self._let_go()

    def close(self) -> None:
        """End the program; the mirrored data stays."""
        with self._lock:
            self._closed = True
            self._let_go()
            if not self._mirror.have and not (self.folder / "run.json").exists():
                shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> Process:
        raise NotImplementedError

    def _said(self, about: dict[str, Any]) -> None:
        """Process a frame that is not about a file."""
        raise NotImplementedError

    def _other(self, line: bytes) -> None:
        """Process a line that is not a frame."""

    def _settle(self) -> None:
        """Called after all lines of one `refresh` were processed."""

    def _ended(self, words: str, code: int) -> None:
        self._wait_to_start(words)

    def _take_some(self, process: Process) -> None:
        """Process lines, at most a limited number; the rest waits for the next call."""
        most = self._mirror.size_bytes + REFRESH_BYTES
        lines, self._waiting = self._waiting or process.lines(), []
        for at, line in enumerate(lines):
            if self.over or self._mirror.full:
                return
            if self._mirror.size_bytes > most:
                self._waiting = lines[at:]
                return
            self._take(line)

    def _take(self, line: bytes) -> None:
        at = line.find(_MARKED)
        if at < 0:
            return self._other(line)
        try:
            frame = json.loads(line[at + len(MARK) :] if len(line) <= LINE_BYTES else b"")
            if frame.get("f") == "":
                self._lost = ""
                return self._said(frame)
            if self._mirror.apply(frame):
                self._lost, self._tries = "", 0
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.refused += 1
            at = len(line)
        self._other(line[:at])

    def _wait_to_start(self, why: str) -> None:
        wait_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
        self._tries += 1
        self._again_s = time.monotonic() + wait_s
        self._lost = f"No data comes from {self.where}: {why}"

    def _give_up(self, why: str) -> None:
        self._lost, self.over = why, True

    def _let_go(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class SshPlace(_Streamed):
    """A folder on a host that ssh reaches. A Workbench reader runs there until this process ends.

    The remote command contains no part of the address, because the folder is sent over stdin.
    """

    def __init__(self, place: str, run: str = "", ssh: Sequence[str] = ("ssh",)) -> None:
        address, self._dir = _address(place)
        self._ssh, host = [*ssh, *SSH_OPTIONS, *address], address[-1]
        self._run, self._key, self._newest = run, b"", 0
        self._answer: str | None = None
        self._met, self._wrong = False, ""
        super().__init__(f"{host}:{self._dir}", f"{host}-{Path(self._dir).name}", skips=False)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Wait until the other side reports the folder."""
        until = time.monotonic() + CONNECT_S
        self.refresh()
        while not (self._met or self.over or self._lost) and time.monotonic() < until:
            if self._process is not None:
                self._process.wait(0.1)
            self.refresh()
        if self.over and not self._met:
            raise _not_there(self._wrong, self.where)
        if not self._met:
            words = self._lost or "the host did not answer"
            raise RunError(
                "The run cannot be followed over ssh.",
                seen=words,
                next_step=f"try this command in a terminal: {shlex.join(self._ssh)} python3 "
                "--version",
                code="WB-RUN-114",
            )

    def _start(self) -> Process:
        source = far_source()
        read = "while n>len(s):s+=os.read(0,n-len(s))or exit()\nexec(s)"
        begin = f"exec({f'import os;n={len(source)};s=bytes()' + chr(10) + read!r})"
        script = f"p=python3; command -v $p >/dev/null || p=python; exec $p -c {shlex.quote(begin)}"
        process = Process([*self._ssh, f"exec sh -c {shlex.quote(script)}"], talks=True)
        how = {"names": NAMES, "most": 4 << 20, "line": LINE_BYTES, "row": 1, "own": False}
        ask = {"dir": self._dir, "run": self._run, "have": self._mirror.have, "how": how}
        with contextlib.suppress(OSError):  # it has ended, and says why
            process.write(source + json.dumps(ask).encode() + b"\n")
        return process

    def _said(self, about: dict[str, Any]) -> None:
        if isinstance(about.get("h"), dict):
            self._dir, self._run = str(about["h"]["dir"]), ""  # this run, whatever comes after it
        if "k" in about:
            self._key, self._newest = bytes.fromhex(about["k"]), int(about["n"])
        if "o" in about:
            self._answer = plain(str(about["o"]))
        if "e" in about:
            self._wrong = str(about["e"])
            self._give_up(_WRONG.get(self._wrong, ("",))[0])
        else:
            self._met = True

    def send(self, order: Order) -> None:
        """Sign an order and let the other side put it into the run's inbox."""
        with self._lock:
            self.refresh()
            process = self._process
            if process is None:
                raise self._unsent(self.problem or "the run is over", lost=True)
            if not self._key:
                raise RunError(
                    "You cannot control this run: your user cannot read the run's secret key.",
                    seen=self.where,
                    next_step="follow the run as the user who started the job. If you are this "
                    "user, wait until the run has begun",
                    code="WB-RUN-116",
                )
            order = orders.later(order, self._newest)
            self._newest, self._answer = order.number, None
            until = time.monotonic() + ANSWER_S
            try:
                process.write(base64.b64encode(orders.packed(order, self._key)) + b"\n")
            except OSError as error:
                raise self._unsent(str(error.strerror or error)) from error
            while self._answer is None and self._process is process and time.monotonic() < until:
                process.wait(0.05)
                self.refresh()
            if self._answer is None:
                raise self._unsent(self._lost or "the host does not answer")
            if self._answer:
                raise self._unsent(self._answer, lost=True)

    def _unsent(self, why: str, *, lost: bool = False) -> RunError:
        what = (
            "Your order (such as stop or pause) did not reach the run"
            if lost
            else "Perhaps your order (such as stop or pause) did not reach the run"
        )
        again = "wait until Workbench has connected again by itself, then give the order again"
        step = None if self.over or why == self._answer else again
        return RunError(what + f": {why}.", seen=self.where, next_step=step, code="WB-RUN-115")


_ADDRESS = re.compile(
    r"ssh://(?:([A-Za-z0-9_.][A-Za-z0-9_.+\\-]*)@)?"
    r"([A-Za-z0-9_.][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(/.*)",
    re.ASCII | re.DOTALL,
)


def _address(place: str) -> tuple[list[str], str]:
    """Return the ssh arguments for a host, and the folder there."""
    match = _ADDRESS.fullmatch(place)
    if match is None or not 0 < int(match[3] or 22) < 1 << 16 or "\0" in unquote(match[4]):
        raise PlanError(
            "This is not a valid address of a folder on an ssh host.",
            seen=place,
            allowed="ssh://[user@]host[:port]/folder with an absolute path",
            next_step="put other settings into ~/.ssh/config, and use the host name from this file",
            code="WB-PLAN-240",
        )
    user, host, port, folder = match.groups()
    options = [*(["-p", port] if port else []), *(["-l", user] if user else [])]
    return [*options, "--", host.strip("[]")], unquote(folder)


class LinesPlace(_Streamed):
    """The output of a command: marked lines, and other lines that the mirror keeps in `log.txt`.

    Args:
        command: The command as a list of words; no shell is used.
        control: The `control` argument of `open_place`.
    """

    def __init__(self, command: Sequence[str], control: Sequence[str] | None = None) -> None:
        self._command, self._about = list(command), dict[str, Any]()
        self._control = list(control) if control else kubectl_control(self._command)
        self._text: list[bytes] = []
        self._first = b""  # of the text: whether a restarted command prints from the beginning
        self._at = self._kept = 0  # number of printed and of kept bytes
        self._tells = False
        super().__init__(shlex.join(command), f"lines-{Path(command[0]).name}", skips=True)
        try:
            self._process = self._start()
        except (OSError, ValueError) as error:
            self.close()
            raise RunError(
                f"The given command cannot be started: {getattr(error, 'strerror', error)}.",
                seen=self.where,
                next_step="try the command in a terminal",
                code="WB-RUN-117",
            ) from error

    def _start(self) -> Process:
        self._at = 0
        return Process(self._command, talks=False)

    def _said(self, about: dict[str, Any]) -> None:
        self._tells = True
        header = about.get("h")
        if not isinstance(header, dict):
            return
        if self._about and header.get("id") != self._about.get("id"):
            return self._give_up("The job has started another run. Follow the job again.")
        self._about = header

    def _other(self, line: bytes) -> None:
        if not line.strip():
            return
        if self._at == 0 and line != self._first:
            self._first, self._kept = line, 0
        self._at += len(line) + 1
        if self._at > self._kept:
            self._kept = self._at
            self._text.append(line + b"\n")

    def _settle(self) -> None:
        self.over = self.over or self._mirror.over
        if not self._text:
            return
        path, text = self.folder / LOG, b"".join(self._text)
        self._text.clear()
        with path.open("ab") as file:
            file.write(text)
            size = file.tell()
        if size > LOG_BYTES:
            fresh = path.with_name(f".{LOG}")
            fresh.write_bytes(path.read_bytes()[-LOG_BYTES // 2 :].partition(b"\n")[2])
            fresh.replace(path)

    def _ended(self, words: str, code: int) -> None:
        words += "" if self._tells else "; the command's output has no records of a run"
        if code == 0 and self._tries >= FRUITLESS:
            return self._give_up(f"{self.where} ended without new data: {words}")
        self._wait_to_start(words)

    def send(self, order: Order) -> None:
        """Let another command deliver an order to the run."""
        if not self._control:
            raise RunError(
                "Workbench has only the output of this run, so it cannot stop or pause the run or "
                "inject faults.",
                seen=self.where,
                allowed="a command for the output (kubectl logs -f) and a command that sends "
                "orders, such as stop or pause (kubectl exec)",
                next_step="give a second command that sends the orders: "
                "wb.follow(..., control=[...])",
                code="WB-RUN-118",
            )
        folder = self._about.get("dir")
        if not (isinstance(folder, str) and folder.startswith("/") and folder.isprintable()):
            raise RunError(
                "The run has not reported its folder yet.",
                seen=self.where,
                next_step="try again after the run's first step",
                code="WB-RUN-119",
            )
        command = [folder if word == "{dir}" else word for word in self._control]
        try:
            done = subprocess.run(
                command, input=orders.order_text(order) + b"\n", capture_output=True,
                timeout=CONTROL_S, start_new_session=True, check=False,
            )  # fmt: skip
            why = plain(done.stderr or done.stdout) or f"exit code {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            done, why = None, str(error)
        if done is None or done.returncode:
            raise RunError(
                "The command for your order (such as stop or pause) failed. "
                "Perhaps the job did not receive the order.",
                seen=f"{shlex.join(command)}\n{why}",
                next_step="try the command in a terminal",
                code="WB-RUN-120",
            )


_KUBECTL_KEPT = {
    "-n", "--namespace", "--context", "--kubeconfig", "--cluster", "--user", "--as",
}  # fmt: skip
_KUBECTL_VALUES = {
    "--since", "--since-time", "--tail", "--limit-bytes", "--max-log-requests",
    "--pod-running-timeout",
}  # fmt: skip


def kubectl_control(command: Sequence[str]) -> list[str]:
    """Return the command for orders to the pod of `kubectl logs [-f] POD [-n NS] [-c C]`; [] for
    others.
    """
    if not command or os.path.basename(command[0]) not in ("kubectl", "oc"):
        return []
    kept, named, words = [], [], iter(command[1:])
    container = ""
    for word in words:
        option, equals, value = word.partition("=")
        if not word.startswith("-"):
            named.append(word)
            continue
        if option in _KUBECTL_KEPT | _KUBECTL_VALUES | {"-c", "--container"} and not equals:
            value = next(words, "")
        if option in ("-c", "--container"):
            container = value
        elif option in _KUBECTL_KEPT:
            kept += [option, value]
        elif option in ("-l", "--selector", "--all-containers", "--all-pods", "-p", "--previous"):
            return []
    if len(named) not in (2, 3) or named[0] != "logs":
        return []
    container = container or (named[2] if len(named) == 3 else "")
    where = [*kept, *(["-c", container] if container else [])]
    program = ["python", "-m", "workbench", "control", "--stdin", "{dir}"]
    return [command[0], "exec", "-i", named[1], *where, "--", *program]
