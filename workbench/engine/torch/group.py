"""A worker's process group: the environment, how a worker joins the group, how it leaves.

Leaving never hangs, and neither does a collective that must end. A collective of gloo ends with an
error when its connections are shut. A collective of NCCL is a CUDA kernel that waits on the device
for its peers. No signal and no closed socket reaches this kernel. The host waits in C, and
`destroy_process_group` waits for the same peers. Only aborting the communicators ends the kernel,
which any thread may do
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). The kernel
then leaves a part of the sum in its tensors, and nothing raises. Later computations in the queue
would use this part. So before an update, a worker waits until the gradients are complete; this wait
can be ended:

    gradients | all-reduce ....... | `verify` | optimizer.step
                        abort -> a mark; `verify` finds it and raises

All updates of `torch.optim.Optimizer` wait, also in users' own loops, and averages of parameters.

Scripts for torchrun make the group themselves, and leave it at their end. In a cell the group
exists already, so an engine replaces `init_process_group` and `destroy_process_group`:

    init: the same world   the existing group is used; it is made again for another backend
          another world    an error with the next step
    destroy                first empties wrappers, as everywhere; the next init uses new keys
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ClusterError, EngineSpentError
from ...shared.events import GROUP_GONE_S
from ..debugging.marks import GROUP, doing, waits_in
from ..transport import address
from . import accelerator, waits

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec

BROKEN_GONE_S = 0.5
GROUP_TIMEOUT = timedelta(minutes=30)
STORE_TIMEOUT = timedelta(seconds=60)
PROBE_S = 5.0
CONNECT_S = 12.0
"""How long torch tries to reach the store. Torch waits in C++: an interrupt only breaks the
connection, and torch tries again until this time. A store that listens answers at once. But torch
asks DNS for the name of the reached host (pytorch#159007): 5 s if the DNS answer is lost."""

RECORDER = (
    "TORCH_FR_BUFFER_SIZE"
    if hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
    else "TORCH_NCCL_TRACE_BUFFER_SIZE"
)
DEVICE_COLLECTIVES = {
    # Else torch's watchdog ends the whole process if a collective takes long or a peer has
    # ended. Here Workbench sees which worker waits for which, and ends the wait.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The flight recorder shows which rank has not entered which collective.
    RECORDER: "2000",
}
"""Settings for NCCL's groups, if the user has not set them
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html)."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Needed between hosts. Gloo would use the address of the host's own name (on Debian 127.0.1.1),
and NCCL the first interface, which may be a container's bridge."""

_torch_init = dist.init_process_group
_torch_destroy = dist.destroy_process_group
_kept: frozenset[int] | None = None  # inodes of other sockets; None: no group was made yet
_store_port = 0
_made: tuple[str, int, int] | None = None  # prefix, rank and size of the existing group
_peers: frozenset[str] = frozenset()  # addresses of the group's hosts, if there are several


def environ(spec: RunSpec) -> dict[str, str]:
    """Return the environment that torchrun would set, so that other libraries find their rank."""
    local_size = len(spec.host_ranks)
    master, port = spec.store or (address.LOOPBACK, 0)
    values = {
        "RANK": spec.rank,
        "LOCAL_RANK": spec.local_rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": spec.host_rank,
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": spec.run_id or spec.prefix or "workbench",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Groups of a cell with env:// meet in the same store; this count separates the attempts.
        "TORCHELASTIC_RESTART_COUNT": zlib.crc32(spec.prefix.encode()) % 1_000_000,
        # Connect when the group is made. A rank that waits for a peer's first connection has no
        # socket that could be shut, so nothing could end its wait.
        "TORCH_GLOO_LAZY_INIT": 0,
        "ACCELERATE_USE_CPU": spec.device == "cpu",  # else it trains on each CPU rank alone
    }
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun does the same
        values["OMP_NUM_THREADS"] = max(1, spec.threads)
    wanted = dict(DEVICE_COLLECTIVES) if spec.backend != "gloo" else {}
    if local_size == spec.world_size:
        values["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        if spec.backend != "gloo":  # else NCCL listens on the first interface
            wanted["NCCL_SOCKET_IFNAME"] = "lo"
    elif spec.store is not None and (ours := address.interface_of(address.address_in(spec))):
        wanted |= dict.fromkeys(INTERFACES, ours)
    values |= {name: value for name, value in wanted.items() if name not in os.environ}
    return {name: str(value) for name, value in values.items()}


@waits_in(GROUP)
def ensure_group(spec: RunSpec) -> None:
    """Join the run's process group, as a client of the keeper's store.

    An existing group stays only if it belongs to this run. In another run's group, or in a group
    that could not be ended, a worker would train alone or wait for ranks that are not in the group.

    Raises:
        ClusterError: The keeper's store cannot be reached.
        EngineSpentError: An earlier group could not be ended.
    """
    if dist.is_initialized():
        if (spec.group_name, spec.rank, spec.world_size) == _made:
            return
        destroy_group()
    if dist.is_initialized():
        raise EngineSpentError(
            "An earlier process group could not be ended.",
            seen=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            code="WB-CLUSTER-055",
        )
    _make_group(spec, spec.group_name, spec.backend)


@waits_in(GROUP)
def _make_group(spec: RunSpec, prefix: str, backend: str, **settings: Any) -> None:
    global _made, _kept
    stores: Any = dist  # torch has the stores, but does not declare them as exported
    store = _connect_store(spec)
    # First of all: another thread may be looking for the group's sockets to break a wait.
    _kept = frozenset(inode for _, inode in _sockets())
    store.set_timeout(GROUP_TIMEOUT)
    _learn_peers(spec, stores.PrefixStore(f"{prefix}addresses/", store))
    hook = sys.excepthook
    try:
        _torch_init(
            backend,
            store=stores.PrefixStore(prefix, store),
            rank=spec.rank,
            world_size=spec.world_size,
            **{"timeout": GROUP_TIMEOUT, **settings},
        )
    except BaseException:
        # torch numbers groups and has counted the failed group. The number is part of the keys
        # under which ranks meet. So the next group would wait for ranks with another count.
        with contextlib.suppress(AttributeError):
            stores.distributed_c10d._world.group_count = 0
        raise
    finally:
        # With every group, torch wraps the previous hook in a new hook, and keeps all of them.
        sys.excepthook = hook
    _made = spec.group_name, spec.rank, spec.world_size
    waits.group_was_made(leavable=spec.heals and backend == "gloo")
    device = torch.device(spec.device)
    if device.type != "cpu" and backend_of(None, device) != "gloo":
        _watch_updates(device)
        # Make the communicator now, with a first collective: not in the timed first step.
        dist.all_reduce(torch.zeros(1, device=device))
        verify()


def _learn_peers(spec: RunSpec, store: Any) -> None:
    """Store the addresses of all workers' hosts; all workers call this together."""
    global _peers
    _peers = frozenset()
    if len(spec.host_ranks) < spec.world_size:
        store.set(str(spec.rank), json.dumps(address.addresses()))
        told = store.multi_get([str(rank) for rank in range(spec.world_size)])
        _peers = frozenset(one for text in told for one in json.loads(text))


def backend_of(group: Any, device: str | torch.device) -> str:
    """Return the backend of a group's collectives for tensors on a device; empty: no backend.

    `get_backend` returns `cpu:gloo,cuda:nccl`; this function returns the part for the device.
    """
    whole: Any = group if group is not None else dist.group.WORLD
    try:
        return str(whole._get_backend(torch.device(device)).name())
    except RuntimeError:
        return ""


def control_wire(group: Any, device: torch.device) -> torch.device:
    """Return the device for a few numbers in a group's collectives: if possible the CPU.

    On the CPU they need no memory of the device and no wait for its computations.
    """
    cpu = torch.device("cpu")
    return cpu if backend_of(group, cpu) else device


def data_wire(group: Any, device: torch.device) -> torch.device:
    """Return the device on which tensors must be when workers send them to each other.

    Gloo cannot send tensors that are on a device
    (https://docs.pytorch.org/docs/stable/distributed.html#backends).
    """
    return torch.device("cpu") if backend_of(group, device) in ("gloo", "") else device


def was_cut(error: BaseException) -> bool:
    """Whether an error is a consequence of another worker's end (`waits.was_cut`)."""
    aborted = _updates is not None and _updates.aborted and not dist.is_initialized()
    return waits.was_cut(error) or (aborted and isinstance(error, ValueError))


def has_group() -> bool:
    """Return whether this worker is in a process group."""
    return dist.is_initialized()


def _connect_store(spec: RunSpec) -> Any:
    global _store_port
    if spec.store is None:
        what = "The engine did not receive the address through which workers find each other."
        raise ClusterError(what, seen=spec.run_id, code="WB-CLUSTER-030")
    host, port = spec.store
    _store_port = port  # an interrupt breaks this connection too, even while it is being made
    stores: Any = dist  # torch has the stores, but does not declare them as exported
    try:
        # Without this check, torch would keep trying if no store listens.
        socket.create_connection((host, port), PROBE_S).close()
        store = stores.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "The store through which workers find each other does not answer.",
            seen=f"{host}:{port}",
            next_step="run the cell again; if that does not help, %cluster restart",
            code="WB-CLUSTER-031",
        ) from error
    store.set_timeout(STORE_TIMEOUT)
    return store


def open_store(spec: RunSpec) -> Any:
    """Return the run's part of the keeper's store, where its processes find each other.

    Raises:
        ClusterError: The keeper's store cannot be reached.
    """
    stores: Any = dist
    return stores.PrefixStore(f"{spec.prefix}links/", _connect_store(spec))


@doing("leaving the process group")
def destroy_group() -> None:
    """Leave the process group; never hangs, even when a peer died in a collective.

    A DDP wrapper that still exists would deadlock here. So the wrapper is detached from the group;
    after that it only calls the plain module.
    """
    if not dist.is_initialized():
        return
    _retire_wrappers()
    try:
        if _updates is not None and not _is_done(_updates, GROUP_GONE_S):
            abort_groups()
            return
        worker = threading.Thread(target=_destroy, name="workbench-destroy", daemon=True)
        worker.start()
        if not _is_over(worker):
            break_collectives()
            _is_over(worker)
    finally:
        _watch_updates(None)


def _is_over(leaving: threading.Thread) -> bool:
    """Wait until a group has ended, but only shortly for a broken group; return whether it has.

    A broken group may leave a thread of gloo's, which waits for a lost message.
    """
    end_s = waits.clock() + GROUP_GONE_S
    while leaving.is_alive() and waits.clock() < end_s and not waits.are_shut_for(BROKEN_GONE_S):
        leaving.join(0.02)
    return not leaving.is_alive()


def rest_group() -> bool:
    """Keep the group for the next run; return False if the group must be made again.

    It must be made again if a strategy has made more groups, of some ranks.
    """
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized() or len(c10d._world.pg_map) > 1:
        return False
    _retire_wrappers()
    return True


def _is_done(updates: Updates, within_s: float) -> bool:
    try:
        return updates.event().wait(within_s)
    except Exception:  # the device failed, and all its computations failed with it
        return False


def _retire_wrappers() -> None:
    """Empty every DDP wrapper of this process: variables may hold it longer than the group."""
    kinds = set(_with_subclasses(torch.nn.parallel.DistributedDataParallel))
    # With 100,000 objects, `isinstance` alone would take a third of a second.
    for wrapper in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        held = wrapper.__dict__
        if "reducer" in held:
            held["forward"] = wrapper.module.forward
            for name in ("reducer", "logger", "process_group", "device_mesh"):
                held.pop(name, None)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    sub: type[Any]
    for sub in kind.__subclasses__():
        yield from _with_subclasses(sub)


def _destroy() -> None:
    # A group whose peer died raises errors while it ends; it ends all the same.
    waits.keep_what_was_left()
    with contextlib.suppress(Exception):
        _torch_destroy()


def break_collectives(*, store: bool = False) -> None:
    """End a collective in which this process is blocked; callable from any thread.

    Aborting the groups, if it is possible, is enough in the first call: a blocked thread then
    continues. Sockets that were shut after that could belong to the next group.

    Args:
        store: Also end a wait in the store.
    """
    if _updates is not None and dist.is_initialized():
        abort_groups()
    else:
        shutdown_group_sockets(store=store)
        waits.connections_were_shut()


def shutdown_group_sockets(*, store: bool = False) -> int:
    """Break the process group's connections, so that a blocked collective raises at once.

    Callable from any thread. The group's sockets are the connected sockets that were opened since
    the group was made and lead to one of the workers' hosts, but not to the store. The user's other
    connections stay. Listening sockets are not touched, because to shut them ends the process.

    Args:
        store: Also break the connection to the store. A worker whose peer has never joined waits in
            the store, not in a collective.

    Returns:
        Number of connections that were shut.
    """
    shut = 0
    for fd, inode in _sockets():
        own = _kept is None or inode in _kept
        if own and not store:
            continue
        with contextlib.suppress(OSError):
            copy = os.dup(fd)
            with socket.socket(fileno=copy) as connection:
                wanted = not own and _is_groups(connection)
                to_store = _store_port and _peer_port(connection) == _store_port
                wanted = wanted or bool(store and to_store)
                if os.fstat(copy).st_ino == inode and wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    shut += 1
    return shut


def _is_groups(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    peer = connection.getpeername()  # OSError for a listening socket, which has no peer
    host = str(peer[0]).removeprefix("::ffff:").partition("%")[0]
    near = host.startswith("127.") or host == "::1"
    return (host in _peers if _peers else near) and bool(peer[1] != _store_port)


def _peer_port(connection: socket.socket) -> int:
    inet = connection.family in (socket.AF_INET, socket.AF_INET6)
    return int(connection.getpeername()[1]) if inet else 0


def _sockets() -> list[tuple[int, int]]:
    """Return (descriptor, inode) of this process's sockets."""
    found = []
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if (status.st_mode & 0o170000) == 0o140000:
                found.append((int(name), status.st_ino))
    return found


# -- collectives on a device -----------------------------------------------------------------------


class Updates:
    """Checks the updates of a process whose group has collectives on a device."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator.of(device)
        self._aborted = threading.Event()
        self._hook = register_optimizer_step_pre_hook(self.verify)

    def close(self) -> None:
        """Stop checking: the group has ended."""
        self._hook.remove()

    @property
    def aborted(self) -> bool:
        """Whether communicators have been aborted since the group was made."""
        return self._aborted.is_set()

    def mark(self) -> None:
        """Before communicators are aborted, note that their results will not be valid."""
        self._aborted.set()

    def verify(self, *unused: Any) -> None:
        """Wait until the device has finished its computations: then all sums are complete.

        Raises:
            ClusterError: The sums are not complete: collectives were aborted meanwhile.
        """
        event = self.event()
        while not (event.query() or self._aborted.is_set()):
            time.sleep(accelerator.POLL_S)
        if self._aborted.is_set():
            raise ClusterError(
                "This step's collectives were aborted before they had finished.",
                seen="sums of gradients that may be incomplete",
                next_step="run the cell again; no result of these collectives was used",
                code="WB-CLUSTER-054",
            )

    def event(self) -> accelerator.Event:
        """Return the event at which the device will have finished its computations."""
        return self._accelerator.event(timed=False)


_updates: Updates | None = None


def _watch_updates(device: torch.device | None) -> None:
    global _updates
    if _updates is not None:
        _updates.close()
    _updates = None if device is None else Updates(device)


def verify() -> None:
    """Wait until a sum or mean on a device is complete; call this before it is used.

    Raises:
        ClusterError: The sum is not complete: collectives were aborted meanwhile.
    """
    if _updates is not None:
        _updates.verify()


def abort_groups() -> None:
    """End all collectives and all groups of this process at once; callable from any thread.

    Only torch's `_abort_process_group` aborts all communicators together. Separate aborts can wait
    for each other (pytorch#119797). The function is experimental. In versions without it, the
    communicators are aborted one after the other.
    """
    if _updates is not None:
        _updates.mark()
    c10d: Any = dist.distributed_c10d
    with contextlib.suppress(Exception):
        if hasattr(c10d, "_abort_process_group"):
            c10d._abort_process_group()
            return
        for group in list(c10d._world.pg_map):
            group.abort()
        dist.destroy_process_group()


# -- groups that a cell makes itself ---------------------------------------------------------------


@dataclass
class _Cell:
    """The running cell, with the facts that its own groups need."""

    spec: RunSpec
    pid: int = field(default_factory=os.getpid)
    made: int = 0  # number of groups under the spec's prefix, without the first group
    told: bool = False


_cell: _Cell | None = None


def let_cells_join(spec: RunSpec) -> None:
    """Let the next cell find its group when it calls `init_process_group`."""
    global _cell
    same = _cell is not None and _cell.spec.group_name == spec.group_name
    _cell = _Cell(spec, made=_cell.made if same and _cell is not None else 0)
    rooms: tuple[Any, Any] = dist, dist.distributed_c10d
    for room in rooms:
        room.init_process_group, room.destroy_process_group = init, leave


@functools.wraps(_torch_init)
def init(*args: Any, **keywords: Any) -> None:
    """Replace `torch.distributed.init_process_group`.

    Raises:
        ClusterError: The cell's ranks cannot make the group that the call asks for.
    """
    cell = _cell
    if cell is None or cell.pid != os.getpid():  # the cell started this process itself
        return _torch_init(*args, **keywords)
    asked = inspect.signature(_torch_init).bind(*args, **keywords).arguments
    there = dist.is_initialized()
    own_place = asked.get("store") is not None or asked.get("init_method") not in (None, "env://")
    size = _number(asked, "world_size")
    if not there and (own_place or size < cell.spec.world_size):
        return _torch_init(*args, **keywords)
    _check_world(cell.spec, size, _number(asked, "rank"))
    backend = asked.get("backend")
    name = None if backend is None else str(backend).lower()
    if there and _serves(cell.spec, name):
        _tell_once(cell)
        return None
    destroy_group()
    cell.made += 1
    settings = {k: v for k, v in asked.items() if k in ("timeout", "pg_options", "device_id")}
    settings = {k: v for k, v in settings.items() if v is not None}
    prefix = f"{cell.spec.group_name}again-{cell.made}/"
    return _make_group(cell.spec, prefix, name or cell.spec.backend, **settings)


@functools.wraps(_torch_destroy)
def leave(group: Any = None) -> None:
    """Replace `torch.distributed.destroy_process_group`, which hangs if a wrapper still exists."""
    whole = group is None or group is dist.GroupMember.WORLD
    if whole and dist.is_initialized() and _cell is not None and _cell.pid == os.getpid():
        _retire_wrappers()
    _torch_destroy(group)


def _number(asked: Mapping[str, Any], name: str) -> int:
    """Return the number that the call or the environment gives, as torch does."""
    given = int(asked.get(name, -1))
    if given >= 0:
        return given
    return int(os.environ.get(name.upper(), -1))


def _check_world(spec: RunSpec, size: int, rank: int) -> None:
    if (size, rank) == (spec.world_size, spec.rank):
        return
    raise ClusterError(
        "init_process_group received a world_size or rank that does not match this cell's group.",
        seen=f"world_size={size}, rank={rank}",
        allowed=f"world_size={spec.world_size}, rank={spec.rank} on this worker. Workbench has set "
        "WORLD_SIZE and RANK to these values, and PyTorch reads them if the arguments are missing",
        next_step="remove both arguments, and the lines that set RANK or WORLD_SIZE"
        + ("" if size == spec.world_size else f"; or use -n {size} in the cell's first line"),
        code="WB-CLUSTER-032",
    )


def _serves(spec: RunSpec, backend: str | None) -> bool:
    """Whether the existing group has this backend.

    Raises:
        ClusterError: No group of this cell can have this backend.
    """
    if backend is None:
        return True
    c10d: Any = dist.distributed_c10d
    kind = torch.device(spec.device).type
    wanted = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    mine = wanted.get(kind)
    if (mine is None and kind == "cpu") or (mine and not dist.is_backend_available(mine)):
        raise ClusterError(
            "This worker cannot use the backend that was given to init_process_group.",
            seen=f"{backend} on {spec.device}",
            allowed=spec.backend,
            next_step=f"use init_process_group({spec.backend!r}), or remove the argument",
            code="WB-CLUSTER-033",
        )
    have = c10d.BackendConfig(c10d.Backend(c10d.get_backend_config())).get_device_backend_map()
    return bool(mine == have.get(kind))


def _tell_once(cell: _Cell) -> None:
    if cell.spec.rank == 0 and not cell.told:
        cell.told = True
        sys.stderr.write(
            f"note: the process group already exists ({cell.spec.backend}, "
            f"{cell.spec.world_size} ranks); init_process_group uses it.\n"
        )
