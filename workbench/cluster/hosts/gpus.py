"""Chooses the GPU of an engine on another host, from the GPUs that the host's agent reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...devices.discovery import Device, Survey
from ...devices.leases import (
    AUTO,
    CPU,
    NOT_PROVED,
    DevicePool,
    Lease,
    Leases,
    once,
    parse_devices,
)
from ...devices.mask import KINDS
from ...devices.reservations import Reservations
from ...errors import ClusterError, PlanError, WorkbenchError

if TYPE_CHECKING:
    from . import wire
    from .agents import Host


class HostDevices:
    """The GPUs of a cluster whose engines are on other hosts, as the agents report them.

    Each host has its own `DevicePool`, with the same rules as on one machine. Some decisions are
    common to all hosts: all compute on GPUs, or all on CPUs; the GPUs have one kind; and the group
    uses NCCL if workers do not share GPUs. Nothing is reserved: reservation files exist only on
    this machine, and a scheduler separates its jobs itself.

    If agents of one host see different GPUs (MPI has one agent per rank), each agent counts as a
    separate host, because its engines can open no other GPUs.

    Args:
        asked: What `parse_devices` takes.
        framework: Devices that it cannot use on their host do not count.
        hosts: All hosts so far, in the order of their places.

    Attributes:
        held: Whether GPUs are reserved on this machine: never.

    Raises:
        PlanError: `asked` is not valid.
    """

    held = False

    def __init__(self, asked: str, framework: str, hosts: Callable[[], Sequence[Host]]) -> None:
        self.asked, self.framework, self._hosts = asked, framework, hosts
        self._wanted = parse_devices(asked)
        self._seen: tuple[wire.HostFacts, ...] = ()
        self._known: dict[int, str] = {}  # rooms of these, by the host's place
        self._pools: dict[str, tuple[wire.HostFacts, DevicePool]] = {}
        self._on_cpu: dict[tuple[str, ...], Leases] = {}  # what was begun there stays there
        self.reservations = Reservations()

    @property
    def settled(self) -> dict[int, Leases]:
        """The state for another kernel: empty, because these clusters cannot be kept."""
        return {}

    def room_of(self, host: Host) -> str:
        """Return the place of a host's devices: its own, or its agent's alone."""
        return self._rooms()[host.place]

    def _rooms(self) -> dict[int, str]:
        hosts = self._hosts()
        if tuple(one.facts for one in hosts) != self._seen:
            self._seen = tuple(one.facts for one in hosts)
            seen: dict[str, set[tuple[str, ...]]] = {}
            for one in hosts:
                uuids = tuple(sorted(str(gpu["uuid"]) for gpu in one.facts.devices))
                seen.setdefault(one.facts.token, set()).add(uuids)
            tokens = {one.place: one.facts.token for one in hosts}
            self._known = {
                place: token if len(seen[token]) == 1 else f"{token} {place}"
                for place, token in tokens.items()
            }
        return self._known

    def _host(self, room: str) -> Host:
        rooms = self._rooms()
        return next(one for one in self._hosts() if rooms[one.place] == room)

    def _pool(self, room: str) -> DevicePool:
        facts = self._host(room).facts
        known, pool = self._pools.get(room, (None, None))
        if pool is None or facts is not known:  # a job that was started again can get other GPUs
            found = tuple(Device(**{**one, "pids": tuple(one["pids"])}) for one in facts.devices)

            def find(framework: str) -> Survey:
                if (why := facts.unfit.get(framework)) is not None:
                    return Survey(notes=tuple(why))
                return Survey(found, () if found else facts.notes)

            pool = DevicePool(self.asked, self.framework, find=find, reserves=False)
            self._pools[room] = facts, pool
        return pool

    def lease(self, rooms: Sequence[str]) -> Leases:
        """Return which device the worker of each rank gets, or would get.

        Args:
            rooms: Of each worker's host (`room_of`).

        Raises:
            PlanError: A host does not have the named GPUs, or they are of different kinds.
            ClusterError: GPUs were asked for and a host has none.
        """
        if (settled := self._on_cpu.get(tuple(rooms))) is not None:
            return settled
        each = {}
        for room, count in Counter(rooms).items():
            try:
                each[room] = self._pool(room).lease(count)
            except (PlanError, ClusterError) as error:  # noqa: PERF203
                raise _lacking(self._host(room), error) from error
        return self._join(rooms, each)

    def hold(
        self, rooms: Sequence[str], engines: Mapping[str, Mapping[int, int]]
    ) -> tuple[Leases, list[str]]:
        """Fix the devices of workers; return them, and the notes for the user.

        Args:
            engines: Pids of the living engines by id, by room; each keeps its GPU in later runs.

        Raises:
            PlanError, ClusterError: As `lease`; or a GPU would be shared that cannot be.
        """
        leases = self.lease(rooms)
        leases.check_shared()
        if not leases.on_gpus:
            self._on_cpu[tuple(rooms)] = leases
            said = [once(text) for text in (*self._notes(rooms), leases.warning)]
            return leases, list(filter(None, said))
        each, said = {}, []
        for room, count in Counter(rooms).items():
            mine = engines.get(room, {})
            each[room], words = self._pool(room).hold(count, mine, max(count, len(mine)))
            name = self._host(room).name
            said += [text if text == NOT_PROVED else f"{name}: {text}" for text in words]
        return self._join(rooms, each), list(dict.fromkeys(said))

    def _join(self, rooms: Sequence[str], each: Mapping[str, Leases]) -> Leases:
        names = {room: self._host(room).name for room in each}
        seen = {room: one.gpus for room, one in each.items()}
        parts = any(one.parts for one in each.values())
        kinds = {one.kind for one in each.values() if one.on_gpus}
        why = self._why_cpu(rooms, each, names)
        if why is not None:
            cpus = tuple(Lease("cpu", "cpu", host=names[room], place=room) for room in rooms)
            return Leases(cpus, "gloo", why)
        (kind,) = kinds
        given = {room: iter(one.leases) for room, one in each.items()}
        leases = tuple(replace(next(given[room]), host=names[room], place=room) for room in rooms)
        if parts:  # each worker sees only its own device
            leases = tuple(replace(one, device=f"{KINDS[kind].device}:0") for one in leases)
        alone = all(one.backend != "gloo" for one in each.values())
        alone = alone and not (parts and len(rooms) > 1)
        said = [f"{names[room]}: {one.warning}" for room, one in each.items() if one.warning]
        backend = KINDS[kind].backend if alone else "gloo"
        return Leases(leases, backend, " ".join(said), kind=kind, parts=parts, places=seen)

    def _why_cpu(
        self, rooms: Sequence[str], each: Mapping[str, Leases], names: Mapping[str, str]
    ) -> str | None:
        """Return why all compute on the CPU, empty if there is nothing to explain; None: on GPUs.

        Raises:
            PlanError: GPUs were named that are of different kinds.
        """
        counts, auto = Counter(rooms), self._wanted == AUTO
        lacking = [room for room, one in each.items() if not one.on_gpus]
        kinds = sorted({one.kind for one in each.values() if one.on_gpus})
        if self._wanted == CPU or not any(self._pool(room).found for room in each):
            return ""
        if lacking:
            some = all(self._pool(room).found for room in lacking)
            words = [
                f"{names[room]} has {_count(len(self._pool(room).found), 'GPU')} for "
                f"{_count(counts[room], 'worker')}"
                for room in lacking
            ]
            step = " With --devices cuda, workers share GPUs." if some else ""
            return f"{'; '.join(words)}, so all workers compute on the CPU.{step}"
        if len(kinds) > 1 and not auto:
            raise PlanError(
                "The hosts have different kinds of GPUs, so the workers cannot form a process "
                "group.",
                seen="; ".join(f"{names[room]}: {one.kind}" for room, one in each.items()),
                allowed="GPUs of one kind",
                next_step="use --devices cpu, or hosts with GPUs of one kind",
                code="WB-PLAN-186",
            )
        if len(kinds) > 1:
            both = " and ".join(kinds)
            return (
                f"Workers on GPUs of different kinds ({both}) cannot form a process group, so all "
                "workers compute on the CPU."
            )
        if auto and len(rooms) > 1 and any(one.parts for one in each.values()):
            return (
                "NCCL cannot connect MIG instances, so with --devices auto, all workers compute on "
                "the CPU. To use the MIG instances, choose --devices cuda. Then the workers "
                "exchange tensors with gloo."
            )
        return None

    def told(self, engines: Mapping[str, Mapping[int, int]]) -> None:
        """Note which engines (pids by id, by room) have been shown their host's GPUs."""
        for room, mine in engines.items():
            self._pool(room).told(mine)

    def free(self) -> None:
        """Let the next run choose again, because variables no longer exist."""
        for _, pool in self._pools.values():
            pool.free()
        self._on_cpu.clear()

    def words(self, rooms: Sequence[str]) -> list[str]:
        """Return the notes below a table of these workers."""
        given = self.lease(rooms)
        warning = [given.warning] if given.warning and not given.on_gpus else []
        return [*self._notes(rooms), *warning]

    def _notes(self, rooms: Sequence[str]) -> list[str]:
        """Return what was left out on each host."""
        each = ((self._host(room).name, self._pool(room).notes) for room in dict.fromkeys(rooms))
        return [f"{name}: {note}" for name, notes in each for note in notes]

    def restore(self, *_: object) -> None:
        """Do nothing, because these clusters are not kept."""


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _lacking(host: Host, error: WorkbenchError) -> WorkbenchError:
    """Return an error about devices as one about a host's."""
    if isinstance(error, ClusterError):
        return ClusterError(
            f"--devices asks for GPUs, but Workbench cannot use any GPU on {host.name}.",
            seen=error.seen,
            allowed="on every host, at least one GPU that the driver reports. If "
            "CUDA_VISIBLE_DEVICES is set on a host, it must contain at least one of these GPUs",
            next_step=error.next_step,
            code="WB-CLUSTER-076",
        )
    if error.code != "WB-PLAN-024":
        return error
    return PlanError(
        f"On {host.name}, Workbench cannot use a GPU with this number. The numbers in --devices "
        "apply to every host.",
        seen=error.seen,
        allowed=f"{error.allowed} (on {host.name})",
        next_step="use numbers that are allowed on every host, or remove --devices, so that "
        "Workbench chooses the GPUs",
        code="WB-PLAN-187",
    )
