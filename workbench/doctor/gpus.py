"""Checks that need a driver, a GPU or a framework; this module judges the children's results.

This module does not use devices. `probes.py` uses them, in processes with time limits, and reports
facts (plain JSON). So each judgement can be tested with invented facts.

`workbench doctor --gpu-test` says in ten minutes whether all of this works on these GPUs. Each
stage is a process with a time limit. A hang or a crash ends only its stage, and is the result of
the stage. After each stage the report is written again, so nothing is lost if the test ends early.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices.discovery import Device, survey
from ..devices.leases import lease
from . import children
from .report import MARKS, Line, Report, Status, line_text

PROBES = "workbench.doctor.probes"
FACTS = "facts."
"""Lines of children with this prefix are for this module, not for the reader."""


def found() -> list[Device]:
    """Return the GPUs that runs can use."""
    return list(survey().devices)


def count() -> int:
    """Return the number of GPUs that this process can use."""
    return len(found())


# -- the children ---------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """A child process of the doctor.

    Attributes:
        says: Ids and titles of its lines, for the case that it cannot report them.
        gpu: Number of GPUs that it needs.
        package: Package that it needs.
        step: The next step if it hangs.
    """

    name: str
    limit_s: float
    says: Mapping[str, str]
    gpu: int = 0
    package: str = ""
    env: Mapping[str, str] | None = None
    step: str = (
        "look for Xid errors (errors of an NVIDIA GPU) in `dmesg`; you may have to reset the GPU "
        "or restart the machine"
    )


PROBED: tuple[Probe, ...] = (
    Probe("nvml", 10, {}),
    Probe("cuda", 25, {
        "gpu.matmul": "matrix products and convolutions on each GPU",
        "gpu.pinned": "256 MB of pinned memory",
        "gpu.p2p": "copies between GPUs",
        "gpu.events": "time resolution of GPU events",
    }, 1, "torch"),
    Probe("drift", 25, {
        "gpu.drift": "drift of the GPU's timer against this machine's clock",
    }, 1, "torch"),
    Probe("nccl", 25, {
        "gpu.nccl": "NCCL all-reduce of two ranks",
        "gpu.abort": "aborting an NCCL collective",
        "gpu.contexts": "each of two ranks uses only its own GPU",
    }, 2, "torch", {"NCCL_DEBUG": "INFO", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    Probe("tensorflow", 25, {"gpu.tensorflow": "TensorFlow on the GPUs"}, 1, "tensorflow"),
    Probe("warm", 20, {"machine.warm": "a process with PyTorch can be forked"}, 0, "torch",
          step="find the module that uses the GPU or starts threads when it is imported"),
    Probe("gloo", 20, {"machine.gloo": "gloo all-reduce of two processes"}, 0, "torch",
          step="check for a firewall on the loopback interface"),
    Probe("cluster", 28, {"machine.cluster": "two engines start and do an all-reduce"}, 0, "torch",
          step="run `workbench ps`, and stop clusters that you do not need"),
)  # fmt: skip

JUDGED: Mapping[str, str] = {
    "gpu.driver": "driver",
    "gpu.runtime": "driver and torch are compatible",
    "gpu.order": "order of the GPUs",
    "gpu.mig": "MIG",
    "gpu.mode": "compute mode",
    "gpu.health": "health of the GPUs",
    "gpu.pids": "NVML lists the processes on GPUs",
    "gpu.visible": "CUDA_VISIBLE_DEVICES",
    "gpu.iommu": "IOMMU",
    "gpu.auto": "what --devices auto chooses",
}
"""Ids and titles of the checks that are judged from facts."""


def look(probes: Sequence[Probe] = PROBED, at_once: int = 0) -> list[Line]:
    """Run the children and judge their facts: some seconds, or longer on a busy machine."""
    gpus = count()
    with tempfile.TemporaryDirectory(prefix="wb-doctor-") as folder:
        wanted = [p for p in probes if gpus >= p.gpu and _installed(p.package)]
        # Two at a time on a small machine, because more imports of torch would disturb each other.
        jobs = at_once or max(2, min(4, (os.cpu_count() or 1) // 2))
        with ThreadPoolExecutor(jobs) as pool:
            ended = dict(zip((p.name for p in wanted), pool.map(
                lambda p: children.run(PROBES, p.name, {"limit_s": p.limit_s, "gpus": gpus},
                                       p.limit_s, Path(folder), p.env, imports_s=p.limit_s),
                wanted), strict=True))  # fmt: skip
    facts = _facts(ended)
    lines = judge(facts, os.environ)
    for probe in probes:
        lines += _said(probe, ended.get(probe.name), gpus)
    return sorted(lines, key=lambda line: line.id.partition(".")[0], reverse=True)


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return not package or find_spec(package) is not None


def _facts(ended: Mapping[str, children.Ended]) -> dict[str, Mapping[str, Any]]:
    return {
        line.id.removeprefix(FACTS): line.figures
        for one in ended.values() for line in one.lines if line.id.startswith(FACTS)
    }  # fmt: skip


def _said(probe: Probe, ended: children.Ended | None, gpus: int) -> list[Line]:
    """Return a line for each expected line of a child, even if it was not reported."""
    if ended is None:
        why = _why_not(probe, gpus)
        return [Line(id, "unknown", what, why) for id, what in probe.says.items()]
    said = [line for line in ended.lines if not line.id.startswith(FACTS)]
    silent = {id: what for id, what in probe.says.items() if id not in {one.id for one in said}}
    status: Status
    for id, what in silent.items():
        step = stacks = ""
        if ended.imports:
            status, found, step = "warn", *_slow(ended)
        elif ended.late:
            status, found = "fail", f"hangs: no answer within {ended.seconds:.0f} s"
            step = f"{probe.step}; `workbench doctor --json` shows under `stacks` where the check "
            step += "hangs"
            stacks = _stacks(ended.tail, 100)
        elif ended.status:
            status, found = "fail", f"the check crashed: {_last(ended.tail)}"
        else:
            status, found = "unknown", "the check printed nothing"
        said.append(Line(id, status, what, found, step, round(ended.seconds, 2), stacks=stacks))
    return said


def _slow(ended: children.Ended) -> tuple[str, str]:
    """Return what was found, and the next step, of a check that did not get beyond its imports."""
    cores = os.cpu_count() or 1
    found = (
        f"slow: the check's imports took more than {ended.seconds:.0f} s "
        f"(load average {children.load():.1f} on {cores} cores)"
    )
    if children.busy():
        return found, "run this command again when this machine is less busy"
    return found, "run this command again; if it is slow again, install Python on a faster disk"


def _why_not(probe: Probe, gpus: int) -> str:
    if not _installed(probe.package):
        return f"{probe.package} is not installed"
    return "no GPU here" if not gpus else f"needs {probe.gpu} GPUs, but Workbench can use {gpus}"


def _last(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


# -- judgements ------------------------------------------------------------------------------------


def judge(facts: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]) -> list[Line]:
    """Return the lines of `JUDGED` from the facts of NVML and torch."""
    nvml, cuda = facts.get("nvml", {}), facts.get("cuda", {})
    gpus = list(nvml.get("gpus", []))
    lines: dict[str, tuple[Status, str, str]] = {"gpu.driver": driver(nvml)}
    if nvml.get("driver"):
        lines["gpu.runtime"] = runtime(nvml, facts.get("build", cuda), gpus)
    if gpus:
        lines["gpu.order"] = order(gpus, cuda, env)
        lines["gpu.mig"] = mig(gpus)
        lines["gpu.mode"] = mode(gpus)
        lines["gpu.health"] = health(gpus, nvml.get("xid", ()))
        lines["gpu.pids"] = pids(facts.get("pids", {}))
        lines["gpu.visible"] = visible(gpus, cuda, env)
        lines["gpu.iommu"] = iommu(gpus)
    lines["gpu.auto"] = auto(len(gpus))
    return [
        Line(id, *lines.get(id, ("unknown", "no GPU here", ""))[:1], JUDGED[id],
             *lines.get(id, ("unknown", "no GPU here", ""))[1:])
        for id in JUDGED
    ]  # fmt: skip


def driver(nvml: Mapping[str, Any]) -> tuple[Status, str, str]:
    """Check whether a driver answers, and for which GPUs."""
    files = nvml.get("device_files", [])
    if nvml.get("driver"):
        names = [gpu.get("name", "?") for gpu in nvml.get("gpus", [])]
        cuda = ".".join(map(str, nvml.get("cuda_driver", [])))
        status: Status = "ok" if names else "fail"
        return status, f"{nvml['driver']}, CUDA up to {cuda}, GPUs: {', '.join(names) or 'none'}", (
            "" if names else "run `nvidia-smi -L`; if it lists no GPU, look for errors in `dmesg`"
        )  # fmt: skip
    why = nvml.get("error", "NVML does not answer")
    if files:
        step = (
            "if this is a container, start it with docker run --gpus all; after a driver update, "
            "restart the machine"
        )
        step = "run pip install nvidia-ml-py" if "No module" in why else step
        return "fail", f"{files[0]} exists, but: {why}", step
    return "unknown", "no GPU here", ""


def runtime(
    nvml: Mapping[str, Any], build: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]
) -> tuple[Status, str, str]:
    """Check whether the wheel of torch runs with this driver, on these GPUs."""
    if not build:
        return "unknown", "torch is not installed", (
            "pytorch.org/get-started has the command that installs torch"
        )  # fmt: skip
    if not build.get("cuda"):
        return "fail", f"torch {build.get('version')} is built without CUDA", (
            "pytorch.org/get-started has the command for a build with CUDA"
        )  # fmt: skip
    wants = [int(part) for part in str(build["cuda"]).split(".")[:2]]
    has = [int(part) for part in nvml.get("cuda_driver", [0, 0])]
    said = (
        f"torch {build['version']} is built for CUDA {build['cuda']}; "
        f"the driver supports CUDA up to {has[0]}.{has[1]}"
    )
    if has[0] < wants[0]:
        return "fail", said, f"install a newer driver, or a torch built for CUDA {has[0]}"
    unfit = [
        f"{gpu['name']} (sm_{gpu['capability'][0]}{gpu['capability'][1]})"
        for gpu in gpus if gpu.get("capability") and not fits(gpu["capability"], build["archs"])
    ] if build.get("archs") else []  # fmt: skip
    if unfit:
        return "fail", f"{said}; torch has no code for {', '.join(unfit)}", (
            "install a torch built for this GPU; the installed torch is built for "
            f"{', '.join(build['archs'])}"
        )  # fmt: skip
    if has < wants:
        return "ok", f"{said} (compatible: the major version is the same)", ""
    return "ok", said, ""


def fits(capability: Sequence[int], archs: Sequence[str]) -> bool:
    """Whether a build has code for a GPU: its own, an older one of its major, or PTX."""
    major, minor = capability
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        if not digits:
            continue
        a_major, a_minor = int(digits[:-1] or 0), int(digits[-1])
        if kind == "sm" and a_major == major and a_minor <= minor:
            if number[-1].isalpha() and (a_major, a_minor) != (major, minor):
                continue  # sm_90a runs on 9.0 alone
            return True
        if kind == "compute" and (a_major, a_minor) <= (major, minor):
            return True
    return False


def order(
    gpus: Sequence[Mapping[str, Any]], cuda: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[Status, str, str]:
    """Check whether NVML and torch number the GPUs equally."""
    theirs = [_bare(one.get("uuid", "")) for one in cuda.get("gpus", [])]
    if not theirs:
        return "unknown", "torch did not list its GPUs", ""
    ours = [_bare(gpu["uuid"]) for gpu in gpus]
    strange = [uuid for uuid in theirs if uuid not in ours and not uuid.startswith("MIG")]
    if strange:
        return "warn", f"torch has a GPU that NVML does not list: {strange[0]}", (
            "check whether the machine has MIG instances, or whether a container shows different "
            "GPUs to torch and to NVML"
        )  # fmt: skip
    places = [ours.index(uuid) for uuid in theirs if uuid in ours]
    if places == sorted(places):
        return "ok", f"same order as NVML: {places}", ""
    return "warn", f"torch lists the GPUs in another order than NVML: {places}", (
        "no action needed for engines: they select GPUs by UUID. For other programs, run "
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    )  # fmt: skip


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def mig(gpus: Sequence[Mapping[str, Any]]) -> tuple[Status, str, str]:
    """Check which GPUs are divided into instances."""
    cut = [gpu["index"] for gpu in gpus if gpu.get("mig")]
    if not cut:
        return "ok", "off", ""
    return "warn", f"on for GPU {', '.join(map(str, cut))}", (
        "to use a MIG instance, train with one worker, or use --devices cuda. NCCL cannot connect "
        "MIG instances. So with --devices auto, a run with more than one worker uses other GPUs or "
        "the CPU (docs/gpus.md)"
    )  # fmt: skip


MODES = {0: "default", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


def mode(gpus: Sequence[Mapping[str, Any]]) -> tuple[Status, str, str]:
    """Check whether more than one process can use a GPU."""
    odd = {gpu["index"]: MODES.get(gpu.get("mode", 0), "?") for gpu in gpus if gpu.get("mode")}
    if not odd:
        return "ok", "default: several processes can share a GPU", ""
    words = ", ".join(f"GPU {i} {word}" for i, word in odd.items())
    if "PROHIBITED" in odd.values():
        return "fail", f"{words}: no process can use a GPU in mode PROHIBITED", (
            "an administrator can reset the mode: nvidia-smi -c 0"
        )  # fmt: skip
    return "warn", f"{words}: only one process can use the GPU", (
        "give each worker its own GPU; an administrator can allow sharing: nvidia-smi -c 0"
    )  # fmt: skip


def health(gpus: Sequence[Mapping[str, Any]], xid: Sequence[str]) -> tuple[Status, str, str]:
    """Check whether a GPU is lost, or has uncorrected memory errors."""
    lost = [f"GPU {gpu['index']}: {gpu['error']}" for gpu in gpus if gpu.get("error")]
    if lost:
        return "fail", "; ".join(lost), (
            "set CUDA_VISIBLE_DEVICES to the other GPUs, and ask an administrator to reset this "
            "GPU or to restart the machine"
        )  # fmt: skip
    ecc = [f"GPU {g['index']}: {g['ecc']} errors" for g in gpus if g.get("ecc")]
    if ecc:
        return "fail", f"uncorrected memory errors: {'; '.join(ecc)}", (
            "results may be wrong: set CUDA_VISIBLE_DEVICES to the other GPUs, and ask an "
            "administrator to reset this GPU"
        )  # fmt: skip
    if xid:
        return "warn", f"the system's log has Xid errors: {xid[-1][-160:]}", (
            "docs.nvidia.com/deploy/xid-errors explains the Xid number"
        )  # fmt: skip
    return "ok", "all GPUs answer, and there are no uncorrected memory errors", ""


def pids(said: Mapping[str, Any]) -> tuple[Status, str, str]:
    """Check whether NVML and this system use the same pids."""
    seen = said.get("sees_own_pid")
    if seen is None:
        return "unknown", "no process of Workbench used a GPU", ""
    if seen:
        return "ok", "yes", ""
    return "warn", "NVML does not list the pids of this container", (
        "to see the GPU memory of each engine, start the container with docker run --pid=host"
    )  # fmt: skip


def visible(
    gpus: Sequence[Mapping[str, Any]], cuda: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[Status, str, str]:
    """Check which GPUs the environment hides."""
    words = [f"{n}={env[n]}" for n in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if n in env]
    said = ", ".join(words) or "not set"
    left = count()
    if left == len(gpus):
        return "ok", said, ""
    if not left:
        return "warn", f"{said}: Workbench cannot use any GPU", (
            "unset CUDA_VISIBLE_DEVICES, or set it to GPUs that `nvidia-smi -L` lists"
            if "CUDA_VISIBLE_DEVICES" in env
            else "see the checks 'MIG', 'compute mode', 'health of the GPUs' and "
            "'administrator's limits'"
        )  # fmt: skip
    return "ok", f"{said}: GPUs of this machine: {len(gpus)}, usable devices: {left}", ""


def iommu(
    gpus: Sequence[Mapping[str, Any]], root: Path = Path("/sys/class/iommu")
) -> tuple[Status, str, str]:
    """Check for an IOMMU between the GPUs, which can corrupt their copies."""
    on = root.is_dir() and any(root.iterdir())
    if not on or len(gpus) < 2:
        few = "on, but this machine has fewer than two GPUs, so there are no copies between GPUs"
        return "ok", few if on else "none", ""
    return "warn", "on: copies between this machine's GPUs can be wrong", (
        "if the check of copies between GPUs fails, turn off ACS or the IOMMU, or "
        "export NCCL_P2P_DISABLE=1"
    )  # fmt: skip


def auto(gpus: int) -> tuple[Status, str, str]:
    """The choice of `--devices auto` for 1, for 2, and for as many workers as GPUs."""
    said, warnings = [], []
    for workers in sorted({1, 2, max(1, gpus)}):
        given = lease("auto", workers)
        kinds = ", ".join(dict.fromkeys(one.label for one in given.leases))
        said.append(f"{workers} worker{'s' * (workers > 1)}: {kinds} ({given.backend})")
        if given.warning:
            warnings.append(given.warning)
    return "ok", "; ".join(said), " ".join(dict.fromkeys(warnings))


TOTAL_S = 600.0
STAGES_MODULE = "workbench.doctor.stages"
FAULTS_MODULE = "workbench.doctor.faults"
TRIALS_MODULE = "workbench.doctor.trials"
WANTED = (
    "torch", "ipyparallel", "ipykernel", "zmq", "psutil", "numpy", "cloudpickle", "platformdirs"
)  # fmt: skip
"""Modules that engines need for training."""
CALLED = {"zmq": "pyzmq"}
"""Package names of modules whose package has another name."""


@dataclass(frozen=True)
class Stage:
    """One part of the test.

    Attributes:
        name: Name of the function in its module.
        limit_s: Its time limit; `quick_s` is that of a short test.
        quick: Whether a short test includes it.
        needs: Modules that must be installed; for stages that start engines: `WANTED`.
    """

    name: str
    title: str
    limit_s: float
    quick: bool = False
    quick_s: float = 40.0
    needs: tuple[str, ...] = WANTED
    module: str = STAGES_MODULE


STAGES: tuple[Stage, ...] = (
    Stage("surroundings", "what is installed, and what the driver reports", 45, True, 30, ()),
    Stage("devices", "each device gives the same results as the CPU", 45, True, 30, ("torch",)),
    Stage("group", "an all-reduce without Workbench gives the right sum", 45, True, 30, ("torch",)),
    Stage("collectives", "cells run collectives with tensors on the CPU and on devices", 60, True),
    Stage("strategies", "each strategy trains correctly", 120, True),
    Stage("faults", "interrupts, errors, deaths", 120, True, module=FAULTS_MODULE),
    Stage("telemetry", "Workbench measures injected delays correctly", 60, module=TRIALS_MODULE),
    Stage("memory", "memory is freed", 40, module=TRIALS_MODULE),
    Stage(
        "speed", "speed compared with torchrun, time to the first step", 75, module=TRIALS_MODULE
    ),
    Stage("ways", "precision, compile, accumulation, loaders", 90, module=TRIALS_MODULE),
    Stage("checkpoints", "checkpoint and resume", 40, module=TRIALS_MODULE),
    Stage("refusals", "Workbench refuses impossible requests", 20, module=TRIALS_MODULE),
    Stage(
        "tensorflow",
        "TensorFlow's strategies, then PyTorch in the same cluster",
        75,
        module=TRIALS_MODULE,
    ),
    Stage("labs", "cells of labs 1 and 2", 90, module=TRIALS_MODULE),
)


@dataclass(frozen=True)
class Asked:
    """The settings of the test.

    Attributes:
        device: The kind of device for engines: `cuda`, `cpu`, or another kind of torch.
        gpus: Number of GPUs.
        quick: The shortest form of each stage, fewer stages.
        only: Names of stages; empty: all.
        total_s: Time after which no further stage begins.
    """

    out: Path
    device: str
    gpus: int
    quick: bool = False
    only: tuple[str, ...] = ()
    total_s: float = TOTAL_S


def missing(modules: Sequence[str] = WANTED) -> list[str]:
    """Return the packages of missing modules; no module is imported."""
    from importlib.util import find_spec

    return [CALLED.get(name, name) for name in modules if find_spec(name) is None]


def run(
    asked: Asked, tell: Callable[[str], object] = print, stages: Sequence[Stage] = STAGES
) -> Report:
    """Run the stages one after the other; return the report, which is also written to `asked.out`.

    Args:
        tell: Receives each line at once.
    """
    folder = asked.out
    logs = folder / "stages"
    logs.mkdir(parents=True, exist_ok=True)
    report = Report("gpu-test")
    report.about |= {"device": asked.device, "gpus": asked.gpus}
    began = time.perf_counter()
    for stage in stages:
        if (asked.only and stage.name not in asked.only) or (
            asked.quick and not stage.quick and not asked.only
        ):
            continue
        lines = _stage(stage, asked, logs, began)
        for line in lines:
            tell(line_text(line))
        report.add(lines)
        report.seconds = time.perf_counter() - began
        _write(report, folder)
    _write(report, folder)
    tell("")
    tell(report.verdict())
    return report


def _stage(stage: Stage, asked: Asked, logs: Path, began: float) -> list[Line]:
    """Run one stage; its last line is the result of the whole stage."""

    def whole(status: Any, found: str, step: str = "", seconds: float = 0.0) -> Line:
        return Line(f"stage.{stage.name}", status, stage.title, found, step, round(seconds, 2))

    if lacking := missing(stage.needs):
        names = " ".join(lacking)
        return [whole("unknown", f"not installed: {names}", f"pip install {names}")]
    left_s = asked.total_s - (time.perf_counter() - began)
    limit_s = min(stage.quick_s if asked.quick else stage.limit_s, left_s)
    if limit_s < 5:
        return [
            whole(
                "unknown",
                f"not started: less than 5 s were left of the time limit of {asked.total_s:g} s",
                f"run only this part of the test: workbench doctor --gpu-test --only {stage.name}",
            )
        ]
    told = {
        "device": asked.device, "gpus": asked.gpus, "quick": asked.quick, "limit_s": limit_s,
        "out": str(asked.out),
    }  # fmt: skip
    ended = children.run(stage.module, stage.name, told, limit_s, logs)
    return [*ended.lines, _judge(whole, ended, limit_s)]


def _judge(whole: Callable[..., Line], ended: children.Ended, limit_s: float) -> Line:
    log = "the log (in the report's folder `stages`) shows where this part of the test stopped"
    last = ended.lines[-1].what if ended.lines else "none"
    if ended.late:
        return whole(
            "fail", f"hangs: not finished within {limit_s:.0f} s; last finished check: {last}",
            f"{log}:\n{_stacks(ended.tail)}", ended.seconds,
        )  # fmt: skip
    if ended.status:
        what = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
        said = f"; last line of its log: {line}" if (line := _last_line(ended.tail)) else ""
        return whole("fail", f"crashed ({what}); last finished check: {last}{said}", log,
                     ended.seconds)  # fmt: skip
    if ended.garbage:
        return whole(
            "fail", "the process of this part of the test wrote a line that Workbench cannot read",
            log, ended.seconds,
        )  # fmt: skip
    if not ended.lines:
        return whole("unknown", "ended without a message", log, ended.seconds)
    bad = sum(line.status == "fail" for line in ended.lines)
    passed = sum(line.status in ("ok", "warn") for line in ended.lines)
    found = f"{passed} of {len(ended.lines)} checks passed"
    return whole("fail" if bad else "ok", f"{found}, {ended.seconds:.1f} s", "", ended.seconds)


def _stacks(tail: str, most: int = 30) -> str:
    at = max(tail.rfind("Current thread"), tail.rfind("Thread 0x"), 0)
    begin = tail.rfind("\n", 0, min(at, max(0, len(tail) - 3000)) + 1) + 1
    return "\n".join(tail[begin:].splitlines()[:most])


def _last_line(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _write(report: Report, folder: Path) -> None:
    """Write the report, and the whole folder as one file for an issue."""
    report.files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".zip"
    )  # fmt: skip
    report.write(folder)
    packed = folder.parent / f".{folder.name}.{os.getpid()}"
    made = Path(shutil.make_archive(str(packed), "zip", folder))
    made.replace(folder.parent / f"{folder.name}.zip")


def said_by(command: Sequence[str], limit_s: float = 20.0) -> str:
    """Return the output of a command; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def summary(report: Report) -> str:
    """Return the failures and warnings again, for the end of the output."""
    bad = [line for line in report.lines if line.status in ("fail", "warn")]
    return "\n".join(f"{MARKS[line.status]:<5} {line.id}: {line.found}" for line in bad)
