"""Keeps students' code away from the checks as well as the system allows, and starts such kernels.

It also defines which part of the grader's environment a notebook sees, and where its files are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .processes import GB, MARK

How = Literal["namespaces", "user", ""]

_PACKAGES = Path(__file__).resolve().parents[3]
_CHECKS = Path("workbench", "labs", "checks")
_INSTALLED = ("lib*/python3*/*-packages", "lib*/python3/*-packages", "python3*/*-packages",
              "*/lib/python3*/site-packages", "*/*/lib/python3*/site-packages",
              "pkgs/*/site-packages")  # fmt: skip
_UIDS = range(58_000, 60_000)
_PROBE_S = 60.0
_DAC_OVERRIDE = 1  # capabilities(7)
_PROBE = """
import os, sys
import workbench.labs.side
seen = [path for path in sys.argv[2:] if os.path.exists(path)]
try:
    os.kill(int(sys.argv[1]), 0)
    seen.append("the grader's process")
except OSError:
    pass
print("seen: " + (seen[0] if seen else "nothing"))
"""


@dataclass(frozen=True)
class Isolation:
    """How kernels are kept apart from the grading process.

    Attributes:
        how: `namespaces`, `user`, or empty for no isolation.
        why: Why there is no better isolation, in words.
        network: Whether kernels reach the network that we reach.
        hidden: Files and folders that no kernel may see, such as the notebooks of other students.
    """

    how: How = ""
    why: str = ""
    network: bool = True
    hidden: Sequence[str] = ()

    @property
    def words(self) -> str:
        """One line for the head of the report."""
        if self.how == "namespaces":
            said = (
                "isolated: cells cannot read the memory or the files of the grading process, and "
                "cannot send signals to it"
            )
            more = f" (but cells can reach the network; the reason: {self.why})"
            return said + more if self.network else said
        if self.how == "user":
            return ("partly isolated: cells run as another user, so they cannot send signals to "
                    "the grading process. But cells can read the files that every user may read "
                    f"(stronger isolation is not possible: {self.why})")  # fmt: skip
        return (
            "not isolated: cells can read the checks, and they can end the grading process "
            f"({self.why})"
        )

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {
            "isolated": bool(self.how), "how": self.how or "not isolated",
            "network": self.network, "words": self.words,
        }  # fmt: skip


NOTHING = Isolation("", "isolation was not requested")


def find_out() -> Isolation:
    """Return the best isolation that works here: each is tried with a real process."""
    if not sys.platform.startswith("linux"):
        return Isolation("", f"{sys.platform} has no namespaces")
    if os.getuid() == 0 and not _enters_folders():
        why = (
            "root does not have the Linux capability CAP_DAC_OVERRIDE here, so root cannot enter "
            "other users' folders"
        )
        return Isolation("", why)
    why = _tried(Isolation("namespaces", network=False))
    if not why:
        return Isolation("namespaces", network=False)
    if not _tried(Isolation("namespaces")):
        return Isolation("namespaces", why)
    if os.getuid() == 0:
        more = _tried(Isolation("user"))
        return Isolation("user", why) if not more else Isolation("", f"{why}; {more}")
    return Isolation("", why)


def _enters_folders() -> bool:
    """Whether this process may enter folders of other users, as root usually may."""
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & 1 << _DAC_OVERRIDE)
    return False


def _tried(isolation: Isolation) -> str:
    """Return why a place of this kind is not possible; empty if it is."""
    how = isolation.how
    try:
        with tempfile.TemporaryDirectory(prefix="wbg-") as made:
            folder = Path(made).resolve() / "probe"
            folder.mkdir()
            place = Place(isolation, folder, stubs=None)
            hidden = [] if how == "user" else [made + "/secret", *map(str, solutions())]
            (folder.parent / "secret").touch()
            command = place.command("-c", _PROBE, str(os.getpid()), *hidden)
            ended = subprocess.run(
                command, env=kept() | {"HOME": str(folder)}, capture_output=True, text=True,
                timeout=_PROBE_S, cwd="/", start_new_session=True, check=False,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if ended.returncode == 0 and "seen: nothing" in ended.stdout:
        return ""
    said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
    return said[-1][:200] if said else f"exit status {ended.returncode}"


class Place:
    """The place where one kernel runs.

    Args:
        folder: The kernel's own; it is given to the user that the kernel becomes.
        stubs: A folder that replaces the checks; None leaves them there.
        memory_bytes: The limit for shared memory.
    """

    def __init__(
        self, isolation: Isolation, folder: Path, stubs: Path | None, memory_bytes: int = GB
    ) -> None:
        self._isolation, self._how = isolation, isolation.how
        self._folder, self._stubs, self._memory_bytes = folder, stubs, memory_bytes
        self.uid = _spare_uid() if isolation.how and os.getuid() == 0 else 0

    def hand_over(self) -> None:
        """Give the folder and its present contents to the kernel's user."""
        if not self.uid:
            return
        for one in (self._folder, *self._folder.rglob("*")):
            os.chown(one, self.uid, self.uid, follow_symlinks=False)
        if self._how == "user":
            self._folder.parent.chmod(0o711)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs Python there."""
        if not self._how:
            return [sys.executable, *arguments]
        self.hand_over()
        work = self._folder / "work"
        given: dict[str, Any] = {
            "how": self._how, "uid": self.uid, "folder": str(self._folder),
            "cwd": str(work if work.is_dir() else self._folder),
        }  # fmt: skip
        if self._how == "namespaces":
            root = self._folder.parent / f"{self._folder.name}-root"
            root.mkdir(mode=0o755)
            given |= {
                "root": str(root), "readable": readable(), "instead": self._instead(),
                "network": self._isolation.network, "memory_bytes": self._memory_bytes,
            }  # fmt: skip
        launcher = [
            os.path.realpath(sys.executable),
            "-I",
            "-S",
            str(Path(__file__).with_name("jail.py")),
        ]
        return [*launcher, json.dumps(given), sys.executable, *arguments]

    def _instead(self) -> list[tuple[str, str]]:
        nothing = self._folder.parent / f"{self._folder.name}-none"
        nothing.mkdir(mode=0o755)
        (empty := nothing.with_name(f"{nothing.name}-file")).touch(mode=0o644)
        hidden = [*solutions(), *_beside(), *map(Path, self._isolation.hidden)]
        needed = [Path(one) for one in (*readable(), str(self._folder))]
        found = [
            (str(one), str(nothing if one.is_dir() else empty))
            for one in hidden
            if not one.is_symlink() and not any(one in (at, *at.parents) for at in needed)
        ]
        if self._stubs is not None:
            found += [(str(one), str(self._stubs)) for one in _checks()]
        return found


def _spare_uid() -> int:
    """Return a user id that no user has and that no process runs as."""
    import pwd

    taken = {int(entry.pw_uid) for entry in pwd.getpwall()}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                taken.add(os.stat(f"/proc/{name}").st_uid)
            except OSError:
                continue
    start = os.getpid() % len(_UIDS)
    order: list[int] = [*_UIDS[start:], *_UIDS[:start]]
    for one in order:
        if one not in taken:
            return one
    raise OSError("all user ids for the students' code are in use")


def _paths() -> list[Path]:
    found = [Path(one).absolute() for one in dict.fromkeys([*sys.path, str(_PACKAGES)]) if one]
    return [one for one in found if one != Path("/")]  # "/" is in it if `-m` runs there


def _checks() -> list[Path]:
    """Return the folders with checks, also those of other readable installations."""
    found = {path / _CHECKS for path in _paths()}
    for place in {*readable(), "/usr", "/usr/local"}:
        for pattern in _INSTALLED:
            found |= set(Path(place).glob(f"{pattern}/{_CHECKS}"))
    return sorted(one for one in found if one.is_dir())


def _is_clone(path: Path) -> bool:
    """Whether a path of Python's contains a clone of Workbench, and not installed packages."""
    installed = path.name in ("site-packages", "dist-packages")
    return not installed and (path / _CHECKS).parent.is_dir()


def _beside() -> list[Path]:
    """Return what is in a clone next to its package: its history contains solutions too."""
    clones = [path for path in _paths() if _is_clone(path)]
    return [one for path in clones for one in path.iterdir() if one.name != "workbench"]


def solutions() -> list[Path]:
    """Return the folders with solutions that are next to a package on Python's path."""
    found = [path / "notebooks" / "solutions" for path in _paths()]
    return [one for one in found if one.is_dir()]


def readable() -> list[str]:
    """Return what Python needs in addition to the system: itself, its packages, Workbench."""
    found: list[Path] = [Path(sys.base_prefix), Path(sys.prefix), Path(sys.executable)]
    found.append(Path(os.path.realpath(sys.executable)).parents[1])
    found += [path / "workbench" if _is_clone(path) else path for path in _paths()]
    for name in ("LD_LIBRARY_PATH", "CUDA_HOME", "CONDA_PREFIX"):
        found += [Path(one) for one in os.environ.get(name, "").split(os.pathsep) if one]
    return _outermost(
        [one for one in found if one.is_absolute() and one.exists() and one != Path("/")]
    )


def _outermost(paths: Sequence[Path]) -> list[str]:
    """Return the paths that are not inside another one."""
    kept_: list[Path] = []
    for path in sorted(set(paths), key=lambda one: len(one.parts)):
        if not any(one in path.parents for one in kept_):
            kept_.append(path)
    return [str(path) for path in kept_]


_KEPT = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME", "SYSTEMROOT", "WORKBENCH_MAX_ENGINES", "WORKBENCH_DEVICES", "WORKBENCH_HOSTS",
    "WORKBENCH_IDLE_TIMEOUT",
)  # fmt: skip
"""The part of the grader's environment that a notebook sees: no secret has one of these names."""

_SWEEPS = 20


PLACES = {
    "HOME": "home", "TMPDIR": "t", "WORKBENCH_HOME": "runs", "IPYTHONDIR": "ipython",
    "JUPYTER_CONFIG_DIR": "jupyter", "JUPYTER_DATA_DIR": "jupyter", "MPLCONFIGDIR": "plots",
    "JUPYTER_RUNTIME_DIR": "jupyter", "XDG_CACHE_HOME": "home", "XDG_CONFIG_HOME": "home",
    "XDG_DATA_HOME": "home", "TORCHINDUCTOR_CACHE_DIR": "home", "KERAS_HOME": "home",
}  # fmt: skip
"""Where a notebook keeps its files, in its own folder."""


def kept() -> dict[str, str]:
    """Return the variables that are taken over from our own environment."""
    found = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if site.ENABLE_USER_SITE:
        found["PYTHONUSERBASE"] = site.getuserbase()
    else:  # then packages in the `HOME` that we give it must not be found either
        found["PYTHONNOUSERSITE"] = "1"
    paths = [os.path.abspath(p) for p in found.get("PYTHONPATH", "").split(os.pathsep) if p]
    found["PYTHONPATH"] = os.pathsep.join([*paths, *({str(_PACKAGES)} - set(paths))])
    return found


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of a notebook that runs in `folder`."""
    for place in {*PLACES.values(), "work"}:
        (folder / place).mkdir(parents=True, exist_ok=True)
    ours = {name: str(folder / place) for name, place in PLACES.items()}
    fixed = {"PYTHONHASHSEED": "0", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    return {**kept(), **ours, **fixed, MARK: mark, "USER": "student"}


def remove(folder: Path) -> None:
    """Remove a folder, also parts that its owner may not write; nothing above it changes."""
    top = os.fspath(folder)

    def allow(_: Callable[..., Any], path: str, __: object) -> None:
        for one in (path, os.path.dirname(path)) if path != top else (path,):
            with contextlib.suppress(OSError):
                if not os.path.islink(one):
                    os.chmod(one, stat.S_IRWXU)

    for _ in range(_SWEEPS):  # one sweep makes folders writable, the next removes them
        if os.path.islink(top) or os.path.isfile(top):
            with contextlib.suppress(OSError):
                os.unlink(top)
        if not os.path.lexists(top):
            return
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(top, onerror=allow)
    with contextlib.suppress(OSError):  # folders in folders, deeper than Python can follow
        subprocess.run(["rm", "-rf", "--", top], check=False, capture_output=True)
