"""Which worker gets which device.

A cluster's GPUs are a list that only grows at its end (`DevicePool`). Every engine sees this list.
So `cuda:k` is the same GPU in every run, and `k` is the local rank of its worker.

`auto` never shares: with more workers than free GPUs it takes the CPU, and says so. With named GPUs
or `cuda`, workers share GPUs if there are more workers than GPUs. Only some strategies can do this
(`Strategy.shares_gpu`), because such a group uses gloo, which has few operations on GPU tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import ClusterError, PlanError
from ..shared.cluster_env import THREADS
from . import limits
from .discovery import PROVED_ON, Device, Survey, survey
from .mask import KINDS
from .reservations import Holder, Reservations, holders, trouble

CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


@dataclass(frozen=True)
class Lease:
    """The device of one worker.

    Attributes:
        device: The torch name in the engine: `cpu`, `cuda:0`. The number is the local rank of a
            worker that does not share its GPU, because engines see only the leased GPUs
            (`mask.py`).
        label: For tables: `cpu`, `cuda:0 NVIDIA H200`.
        gpu: Permanent name (UUID) of the GPU; empty for a CPU.
        sharers: How many workers of the run compute on this GPU, this one included.
        exclusive: Whether only one process at a time can use the GPU.
        host, place: Name of its host, and the index of the host in `Leases.places`, if engines are
            on several hosts; empty on this machine.
    """

    device: str
    label: str
    gpu: str = ""
    sharers: int = 1
    exclusive: bool = False
    host: str = ""
    place: str = ""

    @property
    def word(self) -> str:
        """The device with its host, if it has one; equal only for workers that share it."""
        return f"{self.host} {self.device}" if self.host and self.gpu else self.device


@dataclass(frozen=True)
class Leases:
    """The devices of a run.

    Attributes:
        leases: By rank.
        backend: `cpu:gloo,cuda:nccl` if no workers share a GPU: it sends tensors in both kinds of
            memory. Otherwise `gloo`, because NCCL does not allow sharing.
        warning: A text for the user, or an empty text.
        gpus: The GPUs that engines of this host see, in the order of their numbers there; Only its
            worker sees a MIG instance, because a process can use only one.
        kind: Their kind, a name in `mask.KINDS`; empty if there are no GPUs.
        parts: Whether some are MIG instances.
        places: If engines are on several hosts: the visible GPUs of each host, instead of `gpus`.
    """

    leases: tuple[Lease, ...]
    backend: str = "gloo"
    warning: str = ""
    gpus: tuple[str, ...] = ()
    kind: str = ""
    parts: bool = False
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        """Whether the workers compute on GPUs; either all workers do, or none."""
        return bool(self.leases) and bool(self.leases[0].gpu)

    @property
    def words(self) -> list[str]:
        """The device of each worker; equal only for workers that share it."""
        return [lease.word for lease in self.leases]

    def seen_by(self, lease: Lease | None, place: str = "") -> tuple[str, ...]:
        """Return the GPUs that an engine with this lease sees; None: it has no GPU.

        Args:
            place: The index of its host in `places`.
        """
        if not self.parts:
            return self.places.get(place, ()) if self.places else self.gpus
        return (lease.gpu,) if lease is not None and lease.gpu else ()

    def check_shared(self) -> None:
        """Raise PlanError if a GPU would be shared that only one process can use."""
        gpus = len({one.gpu for one in self.leases})
        for lease in self.leases:
            if lease.sharers > 1 and lease.exclusive:
                raise PlanError(
                    f"{lease.sharers} workers cannot share {lease.label}: its compute mode is "
                    "EXCLUSIVE_PROCESS, so only one process can use it.",
                    seen=f"{len(self.leases)} workers",
                    allowed=f"at most -n {gpus}, so that each worker has its own GPU",
                    next_step=f"use -n {gpus} or --devices cpu; an administrator can allow "
                    "sharing: nvidia-smi -c 0",
                    code="WB-PLAN-161",
                )


def cpu_count() -> int:
    """Return how many cores this process may use: its affinity, and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, cores if quota is None else min(cores, quota))


def _cgroup_cores() -> int | None:
    """Return the whole cores of the cgroup's CPU quota, or None if there is no quota."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = CGROUP_V2.read_text().split()
        return None if quota == "max" else max(1, math.floor(int(quota) / int(period)))
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP_V1 / "cpu.cfs_quota_us").read_text())
        length = int((CGROUP_V1 / "cpu.cfs_period_us").read_text())
        return None if limit <= 0 else max(1, math.floor(limit / length))
    return None


def threads_per_worker(workers: int, cores: int | None = None) -> int:
    """Return the CPU threads of each worker: OMP_NUM_THREADS, or else cores // workers, at least 1.

    torchrun sets the variable to 1 if the user has not; such a 1 does not count.
    """
    found = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = found == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    wanted = os.environ.get(THREADS, "" if by_torchrun else found).split(",")[0].strip()
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return max(1, (cpu_count() if cores is None else cores) // max(1, workers))


AUTO, CPU = "auto", "cpu"


def parse_devices(devices: str | Sequence[int]) -> str | tuple[int, ...]:
    """Return the parsed value: `auto`, `cpu`, a kind of accelerator, or GPU numbers.

    Raises:
        PlanError: The text is not valid.
    """
    if not isinstance(devices, str):
        return tuple(int(index) for index in devices)
    word = devices.strip().lower()
    if word in (AUTO, CPU, *KINDS):
        return word
    parts = [part.strip().removeprefix("cuda:") for part in word.split(",")]
    if all(part.isdecimal() and part.isascii() for part in parts):
        return tuple(int(part) for part in parts)
    raise PlanError(
        "--devices has an invalid value.",
        seen=devices,
        allowed="`auto`, `cpu`, `cuda`, or GPU numbers such as 0,1",
        code="WB-PLAN-025",
    )


@dataclass(frozen=True)
class Choice:
    """The GPUs of a cluster, in the order in which its engines see them.

    Attributes:
        cpu: Whether this number of workers computes on the CPU all the same.
        why: The reason, for the user.
    """

    gpus: tuple[Device, ...] = ()
    cpu: bool = False
    why: str = ""


def choose(
    devices: str | Sequence[int],
    workers: int,
    found: Survey,
    *,
    taken: Mapping[str, Holder] | None = None,
    first: Sequence[str] = (),
    own: Iterable[int] = (),
) -> Choice:
    """Choose the GPUs for this many workers.

    `auto` and `cuda` take the least used ones (first those on which no other process computes, then
    those with the least memory in use) and order them by number, so that neighbouring GPUs stay
    neighbours.

    Args:
        devices: What `parse_devices` takes.
        taken: GPUs that other notebooks hold; `auto` does not take them.
        first: GPUs that the cluster has already; they stay first.
        own: This cluster's processes, which do not count as other users.

    Raises:
        PlanError: A GPU is named that does not exist, or twice.
        ClusterError: GPUs were asked for and there is none.
    """
    wanted = parse_devices(devices)
    if wanted == CPU:
        return Choice(cpu=True)
    gpus = list(found.devices)
    if wanted == AUTO:
        gpus = [gpu for gpu in gpus if gpu.kind != "mps"]  # never tested: only if it is requested
    elif isinstance(wanted, str):
        gpus = [gpu for gpu in gpus if gpu.kind == wanted]
    if not gpus and wanted == AUTO:
        return Choice(cpu=True)
    if not gpus:
        raise ClusterError(
            f"--devices {devices} requires GPUs, but no GPU can be used.",
            seen=devices,
            allowed="GPUs that the driver reports"
            + " and that CUDA_VISIBLE_DEVICES contains" * ("CUDA_VISIBLE_DEVICES" in os.environ)
            + _limit(),
            next_step=" ".join(found.notes or ["Run nvidia-smi to see what the driver finds."])
            + " Or train on the CPU with --devices cpu.",
            code="WB-CLUSTER-004",
        )
    if not isinstance(wanted, str):
        return Choice(_numbered(wanted, gpus))
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    kept = [by_uuid[uuid] for uuid in first if uuid in by_uuid]
    return _least_used(wanted, workers, gpus, kept, taken or {}, set(own))


def _numbered(wanted: Sequence[int], gpus: Sequence[Device]) -> tuple[Device, ...]:
    known = {gpu.index: gpu for gpu in gpus}
    for position, index in enumerate(wanted):
        if index not in known:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise PlanError(
                "--devices contains a GPU that this notebook cannot use.",
                seen=index,
                allowed=", ".join(map(str, known))
                + (f" (positions in CUDA_VISIBLE_DEVICES={visible})" if visible else "")
                + _limit(),
                next_step="use allowed numbers; or remove --devices, so that Workbench chooses the "
                "GPUs",
                code="WB-PLAN-024",
            )
        if index in wanted[:position]:
            raise PlanError(
                "--devices contains the same GPU twice.",
                seen=",".join(map(str, wanted)),
                next_step="use each number only once; or remove --devices, so that Workbench "
                "chooses the GPUs",
                code="WB-PLAN-344",
            )
    return tuple(known[index] for index in wanted)


def _least_used(
    wanted: str,
    workers: int,
    gpus: Sequence[Device],
    kept: Sequence[Device],
    taken: Mapping[str, Holder],
    own: set[int],
) -> Choice:
    def use(gpu: Device) -> tuple[bool, bool, int, int, int]:
        others = len(set(gpu.pids) - own)
        return gpu.part >= 0, gpu.uuid in taken, others, gpu.used_bytes or 0, gpu.index

    kind = kept[0].kind if kept else min(gpus, key=use).kind  # a group has one kind
    rest = sorted((gpu for gpu in gpus if gpu.kind == kind and gpu not in kept), key=use)
    if wanted == AUTO:
        whole = [gpu for gpu in rest if gpu.part < 0]
        fit = [
            gpu for gpu in (whole if workers > 1 else rest)
            if gpu.uuid not in taken and not (gpu.exclusive and set(gpu.pids) - own)
        ]  # fmt: skip
        if len(kept) + len(fit) < workers or (workers > 1 and any(g.part >= 0 for g in kept)):
            return Choice(tuple(kept), cpu=True, why=_cpu_words(workers, gpus, taken, own))
        rest = fit
    fresh = sorted(rest[: max(0, workers - len(kept))], key=lambda gpu: gpu.index)
    return Choice((*kept, *fresh))


def _cpu_words(
    workers: int, gpus: Sequence[Device], taken: Mapping[str, Holder], own: set[int]
) -> str:
    held = {gpu.place: taken[gpu.uuid] for gpu in gpus if gpu.uuid in taken}
    said = [f"{place} is reserved by {who}" for place, who in held.items()]
    busy = [gpu.place for gpu in gpus if gpu.exclusive and set(gpu.pids) - own]
    said += [f"another process uses {one}, which is in mode EXCLUSIVE_PROCESS" for one in busy]
    if any(gpu.part >= 0 for gpu in gpus) and workers > 1:
        said.append("NCCL cannot connect MIG instances")
    count = f"{workers} worker{'s' if workers > 1 else ''}"
    have = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    usable = len({*held, *busy}) < len(gpus)
    ways = ["with -n 1, the worker uses a GPU"] if workers > 1 and usable else []
    if not any(gpu.exclusive for gpu in gpus):  # such a GPU is neither shared nor taken
        ways.append(
            "with --devices cuda, the workers share the GPUs"
            if workers > 1
            else "with --devices cuda, the worker uses the GPU anyway"
        )
    because = f" ({'; '.join(said)})" if said else ""
    others = f" Other choices: {'; '.join(ways)}." if ways else ""
    return (
        f"There are too few usable GPUs for {count}. Workbench found {have}{because}. So "
        f"{'all workers compute' if workers > 1 else 'the worker computes'} on the CPU.{others}"
    )


def _limit() -> str:
    """Return the administrator's limit as the end of a sentence about what is allowed."""
    source = limits.load().sources.get("devices")
    return f", within the administrator's limit ({source})" if source else ""


def give(choice: Choice, workers: int) -> Leases:
    """Give each worker its device."""
    gpus = tuple(gpu.uuid for gpu in choice.gpus)
    kind = KINDS[choice.gpus[0].kind] if gpus else None
    parts = any(gpu.part >= 0 for gpu in choice.gpus)
    if choice.cpu or kind is None:
        cpus = (Lease("cpu", "cpu"),) * workers
        return Leases(cpus, "gloo", choice.why, gpus, kind.name if kind else "", parts)
    chosen, leases = choice.gpus[:workers], []
    for rank in range(workers):
        place = rank % len(chosen)
        gpu, sharers = chosen[place], len(range(place, workers, len(chosen)))
        device = f"{kind.device}:{0 if parts else place}"
        label = f"{device} {gpu.name} ({gpu.place})"
        leases.append(Lease(device, label, gpu.uuid, sharers, gpu.exclusive))
    warning = _sharing_words(workers, len(chosen))
    alone = not warning and not (parts and workers > 1)
    return Leases(tuple(leases), kind.backend if alone else "gloo", warning, gpus, kind.name, parts)


def _sharing_words(workers: int, gpus: int) -> str:
    if workers <= gpus:
        return ""
    return (
        f"{workers} workers share {gpus} GPU{'s' if gpus > 1 else ''} and take turns. So their "
        "step times do not show the speed of parallel training. NCCL needs one GPU for each "
        "worker, so the workers exchange tensors with gloo."
    )


def lease(devices: str | Sequence[int], workers: int, found: Survey | None = None) -> Leases:
    """Decide what each worker of a run computes on, regardless of other users.

    Args:
        devices: What `parse_devices` takes.
        found: The devices that exist; by default those that `survey` finds.

    Raises:
        PlanError: `devices` was not understood, or names a GPU that does not exist.
        ClusterError: GPUs were asked for and there is none.
    """
    if parse_devices(devices) == CPU:
        return give(Choice(cpu=True), workers)
    return give(choose(devices, workers, survey() if found is None else found), workers)


_said: set[str] = set()  # texts that this kernel has already shown


def once(text: str) -> str:
    """Return the text the first time, and an empty text later."""
    if text in _said:
        return ""
    _said.add(text)
    return text


NOT_PROVED = (
    "Workbench was not yet tested on a GPU of this kind. To test this GPU, run workbench "
    "doctor --gpu-test"
)


def held_words() -> list[str]:
    """Return one line for each reserved GPU of this machine, with its holder."""
    others = holders()
    found = {gpu.uuid: f"{gpu.place} {gpu.name}" for gpu in survey().devices} if others else {}
    return sorted(f"{found.get(gpu, gpu)}: {who}" for gpu, who in others.items())


class DevicePool:
    """The GPUs of one cluster: chosen at the first request, and reserved from the first use on.

    Before something runs on the GPUs, the choice can change: if another notebook uses them first,
    this cluster chooses again. After the first use the choice stays, because variables are there.

    Args:
        asked: What `parse_devices` takes.
        framework: Devices that it cannot use here do not count.
        notebook: The notebook of this cluster, as other users see it.
        find: Returns the devices; replaced in tests.
        reserves: Whether GPUs are reserved against other notebooks of this machine. Notebooks on
            other machines are not considered.

    Attributes:
        held: Whether they are reserved for this cluster now.

    Raises:
        PlanError: `asked` is not valid.
    """

    def __init__(
        self,
        asked: str,
        framework: str = "",
        notebook: str = "",
        find: Callable[[str], Survey] = survey,
        reserves: bool = True,
    ) -> None:
        self.asked, self.framework, self._find = asked, framework, find
        self._reserves = reserves
        self._wanted = parse_devices(asked)
        self._gpus: tuple[str, ...] = ()  # final, in the order in which engines see them
        self._settled: dict[int, Leases] = {}
        self._open: dict[int, Leases] = {}  # the current choice; not final yet
        self._told: dict[int, int] = {}  # engines that have been shown GPUs, and their pids
        self._names: dict[str, str] = {}
        self._notes: tuple[str, ...] = ()
        self._found: tuple[Device, ...] = ()
        self.reservations = Reservations(notebook)
        self.held = False

    @property
    def found(self) -> tuple[Device, ...]:
        """The devices found at the last look."""
        return self._found

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on devices that were left out at the last look."""
        return self._notes

    def lease(self, workers: int, own: Iterable[int] = ()) -> Leases:
        """Return which device each of this many workers gets, or would get.

        Args:
            own: Processes of this cluster, which do not count as other users.

        Raises:
            PlanError, ClusterError: As `choose`.
        """
        settled = self._settled.get(workers) or self._open.get(workers)
        if settled is None:
            settled = self._open[workers] = self._give(workers, own)
        return replace(settled, gpus=max(self._gpus, settled.gpus, key=len))

    def _give(self, workers: int, own: Iterable[int]) -> Leases:
        if self._wanted == CPU:
            return give(Choice(cpu=True), workers)
        found = self._find(self.framework)
        others = self._others()
        choice = choose(self.asked, workers, found, taken=others, first=self._gpus, own=own)
        self._found = found.devices
        busy = [gpu for gpu in choice.gpus if gpu.exclusive and set(gpu.pids) - set(own)]
        self._notes = found.notes + tuple(
            f"{gpu.place} is in compute mode EXCLUSIVE_PROCESS, and another process (pid "
            f"{gpu.pids[0]}) already uses this GPU. So no engine can use this GPU. "
            f"`ps -f -p {gpu.pids[0]}` shows the owner of this process."
            for gpu in busy
        )
        self._names |= {gpu.uuid: gpu.name for gpu in choice.gpus}
        return give(choice, workers)

    def hold(
        self, workers: int, engines: Mapping[int, int], most: int = 0
    ) -> tuple[Leases, list[str]]:
        """Reserve the GPUs of this many workers; return them and the notes for the user.

        Args:
            engines: Pids of the living engines, by id.
            most: How many workers a later run will have: each keeps its GPU then.

        Raises:
            ClusterError: Other notebooks have taken the GPUs that this cluster's engines must use.
            PlanError: A GPU would be shared that cannot be shared.
        """
        bound = any(engines.get(engine) == pid for engine, pid in self._told.items())
        own = tuple(engines.values())
        if (before := self._settled.get(workers)) is not None and not before.on_gpus:
            return self._settle(workers, before, ())  # variables live there
        if not self.held and not bound and self._found:
            self._forget()  # the machine's state may have changed
        for _ in range(_CHOICES):
            if not self._gpus and most > workers:
                self._gpus = self.lease(most, own).gpus
                self._open.clear()
            leases = self.lease(workers, own)
            leases.check_shared()
            if not leases.on_gpus:
                return self._settle(workers, leases, ())
            explicit = self._wanted != AUTO
            others: Mapping[str, Holder] = {}
            if self._reserves:
                others = self.reservations.take(leases.gpus, partly=explicit)
            notes = [
                f"{self._place(gpu, leases)} is reserved by {who}" for gpu, who in others.items()
            ]
            if not others or explicit:
                self.held = True
                return self._settle(workers, leases, notes)
            if bound and set(others) & set(self._gpus):
                break
            self._gpus = self._gpus if self.held else ()
            self._open.clear()
        raise ClusterError(
            f"Another notebook has reserved GPUs that this cluster needs: {'; '.join(notes)}.",
            allowed="only the GPUs that this cluster's engines have already used; an engine cannot "
            "use other GPUs later"
            if bound
            else None,
            next_step="run %cluster restart to use other GPUs; all variables will be lost",
            code="WB-CLUSTER-056",
        )

    def _settle(
        self, workers: int, leases: Leases, held: Sequence[str]
    ) -> tuple[Leases, list[str]]:
        self._settled[workers] = leases
        self._gpus = max(self._gpus, leases.gpus, key=len)
        self._open.clear()
        said = [once(note) for note in self._notes]
        said += [
            f"{note}, so this GPU may not have enough free memory, and measured times are not "
            "reliable."
            for note in held
        ]
        if not leases.on_gpus:
            said.append(once(leases.warning))
        else:
            said.append(once(trouble()) if self._reserves else "")
            names = {self._names.get(one.gpu, "") for one in leases.leases}
            said.append(once(NOT_PROVED) if names - set(PROVED_ON) else "")
            said.append(leases.warning)
        return leases, [text for text in said if text]

    def told(self, engines: Mapping[int, int]) -> None:
        """Note which engines (pids by id) see the GPUs: these engines cannot change them."""
        self._told |= engines

    def free(self) -> None:
        """Give the GPUs back; the next run takes the same GPUs again, or other ones.

        The variables no longer exist, so engines that computed on the CPU can get a GPU now.
        """
        self.reservations.drop()
        self.held = False
        self._settled = {n: one for n, one in self._settled.items() if one.on_gpus}

    def _forget(self) -> None:
        self.reservations.drop()
        self._gpus, self._told, self.held = (), {}, False
        self._settled = {n: one for n, one in self._settled.items() if not one.on_gpus}
        self._open.clear()

    def words(self, workers: int) -> list[str]:
        """Return the notes below a table of this many workers: unused GPUs, and holders of GPUs.

        Empty if there are no GPUs.
        """
        given = self.lease(workers)
        said = [*self._notes, *([] if given.on_gpus or not given.warning else [given.warning])]
        if not self._found:
            return said
        found = {gpu.uuid: gpu.place for gpu in self._found}
        mine = [found.get(gpu, gpu) for gpu in self.reservations.files]
        who = [f"{', '.join(mine)}: this cluster"] if mine else []
        others = self._others()
        who += [f"{found.get(gpu, gpu)}: {holder}" for gpu, holder in others.items()]
        held = {*others, *self.reservations.files}
        free = [place for gpu, place in found.items() if gpu not in held]
        who += [f"{', '.join(free)}: free"] if free else []
        return [*said, f"GPU reservations: {'; '.join(who)}."]

    def _others(self) -> dict[str, Holder]:
        """Return which GPUs other notebooks of this machine hold."""
        return holders(self.reservations.files.values()) if self._reserves else {}

    def _place(self, gpu: str, leases: Leases) -> str:
        return next((one.label for one in leases.leases if one.gpu == gpu), gpu)

    # -- for the next owner of a kept cluster ------------------------------------------------------

    @property
    def settled(self) -> dict[int, Leases]:
        """The leases, by number of workers."""
        return dict(self._settled)

    def restore(
        self, leases: Mapping[int, Leases], files: Mapping[str, str], engines: Mapping[int, int]
    ) -> None:
        """Take the state of another kernel's pool of the same engines."""
        self._settled |= leases
        self._gpus = max((one.gpus for one in leases.values()), key=len, default=())
        self._open.clear()  # they were counted as another cluster's
        self._told = dict(engines) if self._gpus else {}
        self.reservations.take_over(files)
        self.held = bool(self.reservations.files)


_CHOICES = 5
"""How often a cluster chooses again if other notebooks take its GPUs first."""
