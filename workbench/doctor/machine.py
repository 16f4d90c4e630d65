"""Quick checks of this machine that need no framework and no GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import locale
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..devices import limits as administrators
from ..devices.leases import cpu_count
from .report import Check, Line, Status

Found = tuple[Any, ...]
"""Status, result, and optionally the next step and the figures."""

GB = 1 << 30
LEAST: dict[str, str] = {
    "ipykernel": "6.17.1", "ipyparallel": "8.8", "ipywidgets": "7.7.1", "anywidget": "0.9.21",
    "pyzmq": "26", "numpy": "1.26", "cloudpickle": "3", "psutil": "5.9", "nvidia-ml-py": "12.535",
}  # fmt: skip
"""Required packages with their oldest version, as in pyproject.toml."""
FRAMEWORKS: dict[str, str] = {"torch": "2.6", "tensorflow": "2.18"}
SHM_BYTES, MEMORY_BYTES, DISK_BYTES = 256 << 20, 2 * GB, GB
LEAST_FILES, LEAST_TASKS = 1024, 256
SOCKET_PATH = 107
"""Largest length of a Unix socket's path."""
UNDER_TMP = 50
"""Number of characters that Workbench's sockets need below the temporary folder."""


def checks() -> list[Check]:
    """Return the checks, in the order of the report."""
    return [
        Check("machine.python", "Python", python),
        Check("machine.system", "system", system),
        Check("machine.versions", "packages", versions),
        Check("machine.frameworks", "frameworks", frameworks),
        Check("machine.cores", "processor cores", cores),
        Check("machine.memory", "memory", memory),
        Check("machine.shm", "shared memory (/dev/shm)", shm),
        Check("machine.files", "open files", open_files),
        Check("machine.tasks", "processes and threads", tasks),
        Check("machine.memlock", "memory that a process can lock", memlock),
        Check("machine.loopback", "connections on this machine", loopback),
        Check("machine.fork", "starting processes by fork", fork),
        Check("machine.tmp", "temporary folder", temporary),
        Check("machine.runs", "folder of runs", runs),
        Check("machine.locale", "encoding", encoding),
        Check("machine.clock", "clock", clock),
        Check("machine.limits", "administrator's limits", limits),
        Check("machine.widgets", "widgets in JupyterLab", widgets),
    ]


def look() -> list[Line]:
    """Make all checks of this module."""
    return [check.run() for check in checks()]


# -- what is installed -----------------------------------------------------------------------------


def python() -> Found:
    """Which Python this is."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    return "ok", found  # a Python that is too old cannot import this


def system() -> Found:
    """Check whether Workbench was tested on this system."""
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "win32":
        return "fail", found, "Windows needs WSL2: run `wsl --install`, and install Workbench there"
    if sys.platform != "linux":
        return "warn", found, "Workbench is tested only on Linux; please report what does not work"
    return "ok", found


def version(package: str) -> str | None:
    """Return the installed version of a package; None: there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def older(found: str, least: str) -> bool:
    """Whether one version is older than another, by their numbers."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4]]

    return numbers(found) < numbers(least)


def versions(found: dict[str, str | None] | None = None) -> Found:
    """Check whether the required packages are installed and new enough."""
    have = {name: version(name) for name in LEAST} if found is None else found
    lacking = [name for name, one in have.items() if one is None]
    old = [f"{n} {one} < {LEAST[n]}" for n, one in have.items() if one and older(one, LEAST[n])]
    if lacking or old:
        seen = "; ".join([*(f"{name} is missing" for name in lacking), *old])
        wanted = [n for n in LEAST if n in lacking or any(o.startswith(f"{n} ") for o in old)]
        names = " ".join(f"'{name}>={LEAST[name]}'" for name in wanted)
        return "fail", seen, f"{sys.executable} -m pip install {names}"
    shown = ("ipyparallel", "ipykernel", "pyzmq", "numpy")
    return "ok", ", ".join(f"{name} {have[name]}" for name in shown), "", dict(have)


def frameworks(found: dict[str, str | None] | None = None) -> Found:
    """Check whether a framework for training is installed."""
    have = {name: version(name) for name in FRAMEWORKS} if found is None else found
    old = [f"{n} {v} < {FRAMEWORKS[n]}" for n, v in have.items() if v and older(v, FRAMEWORKS[n])]
    if old:
        return "fail", "; ".join(old), "install a newer version", dict(have)
    if not any(have.values()):
        return "fail", "neither torch nor tensorflow is installed", (
            "install torch with the command that pytorch.org/get-started shows for your system"
        ), dict(have)  # fmt: skip
    words = [f"{name} {one}" if one else f"no {name}" for name, one in have.items()]
    return "ok", ", ".join(words), "", dict(have)


# -- resources -------------------------------------------------------------------


def cores() -> Found:
    """Check the number of usable cores: machine, affinity, a container's quota."""
    usable, all_cores = cpu_count(), os.cpu_count() or 1
    figures = {"usable": usable, "all": all_cores}
    found = str(all_cores)
    if usable < all_cores:
        found = f"Workbench can use {usable} of {all_cores} cores"
    if usable < 2:
        return (
            "warn",
            found,
            "all workers share one core, so more workers bring no speed-up",
            figures,
        )
    return "ok", found, "", figures


def memory(limit_bytes: int | None = None, free_bytes: int | None = None) -> Found:
    """Check the memory of the machine, or of this container."""
    import psutil

    total, available = _cgroup_memory()
    system = psutil.virtual_memory()
    limit = (
        min(int(system.total), total or int(system.total)) if limit_bytes is None else limit_bytes
    )
    free = free_bytes
    if free is None:
        free = min(int(system.available), available if available is not None else limit)
    found = f"{free / GB:.1f} of {limit / GB:.1f} GB are free"
    if total and total < int(system.total):
        found += f" (the container's limit; the machine has {system.total / GB:.1f} GB)"
    figures = {"limit_bytes": limit, "free_bytes": free}
    if free < MEMORY_BYTES:
        return (
            "warn",
            found,
            "use fewer engines, or close other programs: an engine with torch needs about 0.4 GB",
            figures,
        )
    return "ok", found, "", figures


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int | None]:
    """Return the control group's limit and the free part of it; None: it has no limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int((root / limit).read_text())
            if most < 1 << 60:
                return most, max(0, most - int((root / used).read_text()))
    return None, None


def shm(folder: Path = Path("/dev/shm")) -> Found:
    """Check whether DataLoader's workers, servers and NCCL have enough shared memory."""
    if not folder.is_dir():
        return ("unknown" if sys.platform != "linux" else "fail"), f"there is no {folder}", (
            f"mount a tmpfs at {folder}"
        )  # fmt: skip
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GB:.2f} of {usage.total / GB:.2f} GB are free"
    figures = {"free_bytes": usage.free, "total_bytes": usage.total}
    step = (
        "in Docker: docker run --shm-size=8g; in Kubernetes: mount an emptyDir with `medium: "
        f"Memory` at {folder}; without a container: delete files in {folder}"
    )
    if not os.access(folder, os.W_OK):
        return "fail", f"{folder} is not writable", f"run chmod 1777 {folder} as root", figures
    if usage.free < SHM_BYTES:
        return "warn", f"{found}: a DataLoader's processes and NCCL may need more", step, figures
    return "ok", found, "", figures


def open_files(soft: int | None = None) -> Found:
    """Check the number of files and sockets that a process can open."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit if soft is None else soft
    figures = {"soft": limit, "hard": hard}
    if 0 <= limit < LEAST_FILES:
        return (
            "warn",
            f"{limit} at most",
            f"run `ulimit -n {max(4096, LEAST_FILES)}` before you start JupyterLab",
            figures,
        )
    return "ok", f"{_count(limit)} at most", "", figures


def tasks(most: int | None = None) -> Found:
    """Check the limit of processes and threads."""
    if most is None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        found = [] if soft == resource.RLIM_INFINITY else [soft]
        for path in ("pids.max", "pids/pids.max"):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((Path("/sys/fs/cgroup") / path).read_text()))
        most = min(found, default=-1)
    if 0 <= most < LEAST_TASKS:
        return (
            "warn",
            f"{most} at most",
            "each engine has about 20 threads, and the limit counts threads too; raise it with "
            "`ulimit -u NUMBER`, or in a container with docker run --pids-limit -1",
            {"most": most},
        )
    return "ok", f"{_count(most)} at most", "", {"most": most}


def memlock() -> Found:
    """Check how much memory can be locked, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/dev/infiniband").is_dir()
    figures = {"soft_bytes": soft, "infiniband": infiniband}
    words = "no limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KB"
    if infiniband and soft != resource.RLIM_INFINITY:
        return (
            "warn",
            f"{words}; this machine's InfiniBand needs `unlimited`",
            "run `ulimit -l unlimited` before you start JupyterLab; otherwise NCCL cannot use "
            "InfiniBand",
            figures,
        )
    return "ok", words, "", figures


def _count(number: int) -> str:
    return "any number" if number in (-1, resource.RLIM_INFINITY) else str(number)


# -- what works ------------------------------------------------------------------------------------


def loopback(host: str = "127.0.0.1", timeout_s: float = 5.0) -> Found:
    """Check whether a process can be reached on this machine."""
    began = time.perf_counter()
    with socket.socket() as server:
        server.settimeout(timeout_s)
        server.bind((host, 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout_s) as client:
            taken, _ = server.accept()
            with taken:
                client.sendall(b"ping")
                answer = taken.recv(4)
    took_ms = 1e3 * (time.perf_counter() - began)
    if answer != b"ping":
        return "fail", f"another program answers on {host}", "check for a proxy or a firewall"
    name_ms = _name_ms(host)
    figures = {"connect_ms": round(took_ms, 2), "name_ms": round(name_ms, 1)}
    if name_ms > 500:
        return "warn", f"{host} works, but resolving its name took {name_ms / 1e3:.1f} s", (
            "add `127.0.0.1 localhost` to /etc/hosts, or export RES_OPTIONS=timeout:1"
        ), figures  # fmt: skip
    return "ok", f"{host} answers in {took_ms:.1f} ms", "", figures


def _name_ms(host: str) -> float:
    began = time.perf_counter()
    with contextlib.suppress(OSError):
        socket.gethostbyaddr(host)
    return 1e3 * (time.perf_counter() - began)


FORK = "import os, sys; pid = os.fork() or os._exit(0); sys.exit(os.waitpid(pid, 0)[1])"


def fork() -> Found:
    """Check whether a process can fork; uses a process without threads."""
    import subprocess

    if not hasattr(os, "fork"):
        return (
            "warn",
            "this system cannot fork a process",
            "no action needed, but each engine takes seconds to start",
        )
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=10, check=False
    )
    if done.returncode:
        step = "see the checks 'processes and threads' and 'memory'"
        return "fail", f"fork failed: {done.stderr.strip()[-200:]}", step
    return "ok", "works"


def temporary(folder: Path | None = None) -> Found:
    """Check whether the temporary folder can be used, and its path is short enough for sockets."""
    folder = folder or Path(tempfile.gettempdir())
    step = (
        "run `export TMPDIR=/another/folder` before you start JupyterLab; this folder must have a "
        "short path and free space"
    )
    status, found, figures = _place(folder)
    if status == "ok" and len(str(folder)) + UNDER_TMP > SOCKET_PATH:
        return "fail", f"{folder}: this path is too long for sockets", step, figures
    return status, found, "" if status == "ok" else step, figures


def runs() -> Found:
    """Check whether runs can be stored."""
    from ..history import folders

    status, found, figures = _place(folders.runs_root())
    step = "export WORKBENCH_HOME=/another/folder before you start JupyterLab"
    if status == "warn":
        step = f"delete files in this folder, or {step}"
    if status == "ok" and (moved := folders.moved()):
        status, found = "warn", moved
    return status, found, "" if status == "ok" else step, figures


def _place(folder: Path) -> tuple[Status, str, dict[str, Any]]:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return "fail", f"{folder} is not writable: {error.strerror}", {}
    free = shutil.disk_usage(folder).free
    found = f"{folder}, {free / GB:.1f} GB are free"
    return ("warn" if free < DISK_BYTES else "ok"), found, {"free_bytes": free}


def encoding() -> Found:
    """Check whether text with characters outside ASCII can be written."""
    files, preferred = sys.getfilesystemencoding(), locale.getpreferredencoding(False)
    found = f"file names: {files}, text: {preferred}"
    if {name.lower().replace("-", "") for name in (files, preferred)} != {"utf8"}:
        return "warn", found, "run `export LC_ALL=C.UTF-8` before you start JupyterLab"
    return "ok", found


CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")


def clock(source: str | None = None) -> Found:
    """Check whether reading the clock is fast, because each step is timed."""
    if source is None:
        try:
            source = CLOCK.read_text().strip()
        except OSError:
            source = ""
    began = time.perf_counter()
    for _ in range(10_000):
        time.perf_counter()
    each_ns = (time.perf_counter() - began) / 10_000 * 1e9
    found = f"{source or 'unknown source'}, {each_ns:.0f} ns for each reading"
    figures = {"source": source, "each_ns": round(each_ns, 1)}
    if source in SLOW_CLOCKS or each_ns > 5_000:
        return (
            "warn",
            found,
            f"as root, write the name of a faster clock source (tsc or kvm-clock) into {CLOCK}. "
            "Workbench reads the clock in each step, so slow readings make each step longer",
            figures,
        )
    return "ok", found, "", figures


def limits() -> Found:
    """Report the limits of an administrator or of the user's environment."""
    found = administrators.load()
    if not found.sources:
        return "ok", "none"
    words = [f"{name} ({where})" for name, where in sorted(found.sources.items())]
    return "ok", ", ".join(words), "", dict(found.sources)


MANAGERS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")


def widgets(roots: Sequence[Path] | None = None) -> Found:
    """Check whether JupyterLab on this machine can show the dashboard."""
    import json

    if roots is None:
        places = [sys.prefix, sys.base_prefix, "/usr/local", "/usr"]
        roots = [Path(place) / "share/jupyter/labextensions" for place in places]
        roots.append(Path.home() / ".local/share/jupyter/labextensions")
    found: dict[str, str] = {}
    for name in MANAGERS:
        for root in roots:
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.setdefault(
                    name, json.loads((root / name / "package.json").read_text())["version"]
                )
    lab = version("jupyterlab")
    words = ", ".join(
        [
            f"jupyterlab {lab}" if lab else "jupyterlab is not installed in this environment",
            *(f"{n} {v}" for n, v in found.items()),
        ]
    )
    lacking = [name for name in MANAGERS if name not in found]
    if not lacking:
        return "ok", words, "", {"jupyterlab": lab, **found}
    if lab is None:
        return "unknown", f"{words}; {', '.join(lacking)} not found", (
            "if JupyterLab runs in another environment, install ipywidgets and anywidget "
            "in that environment too"
        )  # fmt: skip
    return "warn", f"{words}; {', '.join(lacking)} not found", (
        "run `pip install -U ipywidgets anywidget`, then reload the page; without widgets, "
        "Workbench shows text"
    )  # fmt: skip
