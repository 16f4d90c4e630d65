"""The modules that the warm parent imports, and the check whether it can still fork afterwards."""

from __future__ import annotations

import contextlib
import glob
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

IDLE_BEFORE_WARMING_S = 0.5

ENGINE_MODULES = (
    "numpy",
    "ipyparallel.engine.app",
    "ipyparallel.serialize",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "IPython.core.interactiveshell",
    # What the engine would otherwise import while it registers (0.1 s of CPU each).
    "tornado.platform.asyncio",
    "tornado.queues",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "encodings.idna",
    "matplotlib_inline.backend_inline",
)
WORKBENCH_MODULES = (
    "workbench.engine.entry",
    "workbench.engine.runtime",
    "workbench.engine.telemetry.control_link",
    "workbench.engine.training.fit",
    "workbench.engine.training.user_loops",
    "workbench.history.disk",
)
FRAMEWORK_MODULES: dict[str, tuple[str, ...]] = {
    "torch": (
        "torch",
        "torch.distributed",
        "torch.nn.parallel",
        "torch.utils.data",
        "workbench.engine.torch.support",
        "workbench.data.torch_sets",
    ),
    "tensorflow": (
        "tensorflow",
        "keras",
        "workbench.engine.tensorflow.support",
    ),
}
MANY_PER_CORE = 4
"""Engines per core from which they do not each import what the first optimizer step needs."""
FIRST_STEP = "torch._dynamo"
"""What torch imports at the first step of an optimizer; without this every engine would."""

SECOND_STAGE: dict[str, tuple[str, ...]] = {
    "torch": (
        FIRST_STEP,
        "torch.distributed.tensor",
        "torch.distributed.pipelining",
        "torch.distributed.fsdp",
        "workbench.strategies.torch.one_device",
        "workbench.strategies.torch.mirrored",
    ),
    "tensorflow": (
        "workbench.data",
        "workbench.engine.tensorflow.data",
        "workbench.strategies.tensorflow.one_device",
        "workbench.strategies.tensorflow.mirrored",
    ),
}


def first_stage(framework: str) -> dict[str, Any]:
    """Import what every engine needs; return what is reported to the kernel.

    Returns:
        `framework`, `seconds`, `missing` (modules that do not exist or would not import) and, if
        the framework itself did not import or forking is unsafe, `error`.
    """
    began = time.perf_counter()
    names = (*ENGINE_MODULES, *FRAMEWORK_MODULES[framework], *WORKBENCH_MODULES)
    missing = [name for name in names if not import_module(name)]
    report: dict[str, Any] = {"framework": framework, "missing": missing}
    if framework in missing:
        report |= {"lacks": framework, "error": f"{framework} could not be imported"}
    elif "ipyparallel.engine.app" in missing:
        report |= {"lacks": "ipyparallel", "error": "ipyparallel could not be imported"}
    else:
        if framework == "torch":
            sys.modules["torch"].set_num_threads(1)
        else:
            # Tests showed that the threads which TensorFlow starts during its import do no harm.
            _allowed.threads = _count_threads()
        hazard = fork_hazard()
        if hazard:
            report["error"] = f"it is not safe to fork this process: {hazard}"
    report["seconds"] = round(time.perf_counter() - began, 3)
    return report


class SecondStage:
    """Imports while there is nothing else to do, one module at a time.

    Args:
        extra: Further modules, after the framework's.

    Attributes:
        waiting: The modules that are not imported yet.
    """

    def __init__(self, framework: str, extra: Iterable[str] = ()) -> None:
        self.waiting = [*SECOND_STAGE[framework], *extra]
        self._quiet_until = 0.0

    def touch(self, quiet_s: float = IDLE_BEFORE_WARMING_S) -> None:
        """A request is coming: import nothing for this time."""
        self._quiet_until = max(self._quiet_until, time.monotonic() + quiet_s)

    @property
    def due_s(self) -> float:
        """Seconds until the next import; infinite if no module waits."""
        return max(0.0, self._quiet_until - time.monotonic()) if self.waiting else math.inf

    def before(self, engines: int) -> None:
        """Import `FIRST_STEP` now, if it takes less time here than in so many engines."""
        many = engines >= MANY_PER_CORE * len(os.sched_getaffinity(0))
        if many and FIRST_STEP in self.waiting:
            self.waiting.remove(FIRST_STEP)
            import_if_safe(FIRST_STEP)

    def go_on(self) -> bool:
        """Import the next module if it is time; return whether it was the last one."""
        if self.due_s > 0:
            return False
        import_if_safe(self.waiting.pop(0))
        return not self.waiting


def import_module(name: str) -> bool:
    """Import a module by name; False (and a traceback in the log) if that fails."""
    before = opened_device()
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            traceback.print_exc()
        return False
    except Exception:
        traceback.print_exc()
        return False
    finally:
        if not before and opened_device():
            _allowed.culprit = name
    return True


def import_if_safe(name: str) -> bool:
    """Import a module unless doing so would make forking unsafe.

    With a driver of GPUs present the import is first tried in a child, because a library may
    initialise its devices while it loads. After that a process can never fork again.
    """
    if any(map(glob.glob, DRIVERS)) and not _harmless_in_child(name):
        return False
    return import_module(name)


def _harmless_in_child(name: str) -> bool:
    pid = os.fork()
    if pid == 0:
        import_module(name)
        if trouble := fork_hazard():
            sys.stderr.write(
                f"{name} is not imported before the engines start. A process that has imported "
                f"{name} cannot fork safely: {trouble}\n"
            )
            sys.stderr.flush()
        os._exit(1 if trouble else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@dataclass
class _Allowed:
    threads: int = 1
    culprit: str = ""  # the module whose import began to use a GPU


_allowed = _Allowed()


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


FDS, MAPS = "/proc/self/fd", "/proc/self/maps"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def opened_device() -> str:
    """Return the device file that shows that this process uses a GPU; empty: it uses none.

    A process that only counts the GPUs (NVML) opens /dev/nvidiactl, and under WSL2 /dev/dxg; it can
    still fork.
    """
    for fd in os.listdir(FDS):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{FDS}/{fd}")
            if target.startswith(("/dev/nvidia-uvm", "/dev/kfd")):
                return target
            if target == "/dev/dxg":
                with open(MAPS) as maps:
                    if "/libcuda.so" in maps.read():
                        return target
    return ""


def fork_hazard() -> str | None:
    """Return what makes it unsafe to fork this process, or None."""
    threads = _count_threads()
    if threads > _allowed.threads:
        return f"{threads} threads are running"
    if target := opened_device():
        by = f" by {_allowed.culprit}" if _allowed.culprit else ""
        return f"{'ROCm' if 'kfd' in target else 'CUDA'} was initialised{by} ({target} is open)"
    return "TensorFlow has run an operation" if _tensorflow_began() else None


def _tensorflow_began() -> bool:
    """Whether TensorFlow's runtime is up: the children of such a process hang at their first op."""
    module = sys.modules.get("tensorflow.python.eager.context")
    return bool(getattr(getattr(module, "_context", None), "_initialized", False))


@contextlib.contextmanager
def on_hangup(sock: socket.socket, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` when the other side of `sock` has closed, even during a long import.

    The operating system sends SIGIO when something happens on the socket. Outside of this block,
    a loop reads the socket.
    """
    import fcntl

    def check(_number: int, _frame: FrameType | None) -> None:
        poll = select.poll()
        poll.register(sock, select.POLLHUP)
        if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
            end()

    before = signal.signal(signal.SIGIO, check)
    flags = fcntl.fcntl(sock, fcntl.F_GETFL)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, flags | os.O_ASYNC)
    check(signal.SIGIO, None)
    try:
        yield
    finally:
        fcntl.fcntl(sock, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, before)
