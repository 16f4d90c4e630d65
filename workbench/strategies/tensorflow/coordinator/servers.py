"""An engine as a task of TensorFlow's cluster, for the duration of one run.

    engine                         kernel                       coordinator
    a free port  -- address -->  (passed on to all)  -- addresses -->
    tf.distribute.Server starts
    "up", its device  ------------------------------------------>  connects
    answers closures and reads of variables  . . . . . . . . . .   schedules
                 <-----------------------------------------------  "over"
    its sockets close

TensorFlow's gRPC server listens on every interface, even if it is given 127.0.0.1, and cannot be
stopped. So Workbench shuts the listening sockets when the run is over. The rest of the server stays
in the process, but cannot be reached any more.

Source: tf.distribute.Server;
https://www.tensorflow.org/tutorials/distribute/parameter_server_training.

When a worker dies, its closure goes back into the queue, and the others continue. TensorFlow itself
would wait until the worker is back, and connect the whole cluster again. The run would hang during
this time, even at its end. Here a worker that has died takes no part until the next run.

Source: `WorkerPreemptionHandler` in
`tensorflow/python/distribute/coordinator/cluster_coordinator.py`, which this replaces.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.ops import script_ops

from ....engine.telemetry.step_gate import FaultInjector
from ....engine.tensorflow import accelerator
from ....engine.transport.address import address_in
from ....errors import ClusterError
from ....shared import cluster_env
from .feeds import BEGAN, DELAY

if TYPE_CHECKING:
    from ....engine.context import RunContext

MEET_S = 60.0
"""How long the tasks of a run wait for each other."""

PORTS = range(20000, 32000)
"""The default ports.

They are below the ports that the system assigns itself. So no other process takes a port between
the moment it is found and the moment it is opened.
"""

ANSWER_S = 5.0
LISTENING = "0A"


def helpers(context: RunContext) -> range:
    """Return the ranks of the engines that run no cell: workers first, then servers."""
    spec = context.spec
    return range(spec.world_size, 2 * spec.world_size + spec.servers)


def cluster_of(context: RunContext, addresses: Mapping[int, str]) -> tf.train.ClusterSpec:
    """Return TensorFlow's description of the run's cluster."""
    ordered, workers = [addresses[rank] for rank in helpers(context)], context.spec.world_size
    return tf.train.ClusterSpec({"worker": ordered[:workers], "ps": ordered[workers:]})


def serve(context: RunContext) -> None:
    """Act as a worker or a parameter server until the coordinator ends the run.

    Raises:
        ClusterError: The others did not answer.
    """
    spec, ranks = context.spec, helpers(context)
    index = spec.rank - spec.world_size
    job, task = ("worker", index) if index < spec.world_size else ("ps", index - spec.world_size)
    before = listening()
    faults = WorkerFaults(context, index) if job == "worker" else None
    try:
        cluster = cluster_of(context, swap_addresses(context, ranks))
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=spec.threads,
            inter_op_parallelism_threads=max(4, spec.threads),  # a delay holds one of them
        )
        config = accelerator.limit_server(config, spec)
        server = tf.distribute.Server(cluster, job_name=job, task_index=task, config=config)
        context.post("up", accelerator.label(spec.device))
        context.board.wait("over", [0])
        del server
    finally:
        shut(listening() - before)
        if faults is not None:
            faults.close()


def swap_addresses(context: RunContext, ranks: Iterable[int]) -> dict[int, str]:
    """Return the address at which each of these engines opens TensorFlow's server.

    All engines call this together. TensorFlow opens the port itself. Each engine holds its port
    until all engines have found one. So two engines of one host never find the same port.

    Raises:
        ClusterError: An engine did not answer, or has no free port.
    """
    spec = context.spec
    with hold_port(spec.ports) as held:
        port = held.getsockname()[1]
        context.post("address", f"{address_in(spec)}:{port}")
        return context.board.wait("address", ranks, MEET_S)


def hold_port(ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that holds a free port, on every interface, as TensorFlow will.

    Raises:
        ClusterError: All ports are taken.
    """
    among = PORTS if ports is None else range(ports[0], ports[1] + 1)
    for port in random.Random(os.urandom(8)).sample(among, len(among)):
        with contextlib.suppress(ClusterError):
            return cluster_env.listening("", (port, port))
    raise cluster_env.cannot_listen("", (among[0], among[-1]), "all ports are taken")


def check_alive(addresses: Mapping[int, str], parts: Mapping[int, str]) -> None:
    """Connect to each task once: TensorFlow's constructor can wait forever for a missing task.

    Raises:
        ClusterError: A task cannot be reached; `parts` has its name.
    """
    for rank, address in addresses.items():
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except OSError as error:
            raise ClusterError(
                f"{parts[rank].capitalize()} does not answer.",
                seen=f"{address}: {error}",
                next_step="%cluster shows which engines are alive; %cluster restart starts new "
                "engines",
                code="WB-CLUSTER-047",
            ) from error


# -- listening sockets -----------------------------------------------------------------------------


def listening() -> set[tuple[int, str]]:
    """Return (descriptor, inode) of every TCP socket on which this process listens."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/self/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if columns[3] == LISTENING:
                inodes.add(columns[9])
    found = set()
    for entry in os.listdir("/proc/self/fd") if inodes else ():
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        inode = target.removeprefix("socket:[").removesuffix("]")
        if inode in inodes:
            found.add((int(entry), inode))
    return found


def shut(sockets: set[tuple[int, str]]) -> None:
    """Close the sockets that listen on every interface; their owner keeps the descriptors.

    Connections end as well: a later run may get the same port, and gRPC would continue with the old
    connection, to the server that no longer exists.
    """
    ports = set()
    for descriptor, _ in sockets & listening():
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            ports.add(sock.getsockname()[1])
            sock.shutdown(socket.SHUT_RDWR)
    for entry in os.listdir("/proc/self/fd") if ports else ():
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as sock:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                if inet and sock.getsockname()[1] in ports:
                    sock.shutdown(socket.SHUT_RDWR)


# -- delays on a worker ----------------------------------------------------------------------------


class WorkerFaults:
    """Adds the delays that were injected into this worker, inside its closures (`feeds.py`)."""

    def __init__(self, context: RunContext, rank: int) -> None:
        self._faults = context.faults = FaultInjector(rank, context.spec.faults)
        self._closures = 0
        self._registry: dict[Any, Any] = script_ops._py_funcs._funcs
        self._tokens = {BEGAN: self._began, DELAY: self._delay}
        for token, function in self._tokens.items():
            self._registry[token] = self._registry[token.encode()] = function

    def _began(self) -> Any:
        """A closure begins: return the time."""
        self._faults.before_step(self._closures)
        self._closures += 1
        self._faults.spend("data")
        return np.float64(time.perf_counter())

    def _delay(self, began_s: Any) -> Any:
        """The gradients are ready: wait for the injected delay before they are pushed."""
        self._faults.compute_s = time.perf_counter() - float(began_s)
        return np.float64(self._faults.spend("forward") + self._faults.spend("backward"))

    def close(self) -> None:
        """Forget the functions."""
        for token in self._tokens:
            self._registry.pop(token, None)
            self._registry.pop(token.encode(), None)


FAILURES = (
    tf.errors.OpError,
    cluster_coordinator.ClosureInputError,
    cluster_coordinator.ClosureAbortedError,
)


class Survivors:
    """Handles the failures of a coordinator's workers.

    Args:
        cluster: The `Cluster` of a ClusterCoordinator.
    """

    def __init__(self, cluster: Any) -> None:
        cluster.failure_handler.stop()
        cluster.failure_handler = self
        self._cluster = cluster
        self._living = {worker.device_name: worker for worker in cluster.workers}
        for worker in cluster.workers:
            worker.failure_handler = self

    @contextlib.contextmanager
    def wait_on_failure(
        self,
        on_failure_fn: Callable[[BaseException], None] | None = None,
        on_transient_failure_fn: Callable[[], None] | None = None,
        on_recovery_fn: Callable[[], None] | None = None,
        worker_device_name: str = "",
    ) -> Iterator[None]:
        """Run a closure; called on its worker's thread."""
        try:
            yield
        except FAILURES as error:
            derived = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
            if derived or self._cluster._record_and_ignore_transient_ps_failure(error):
                if on_transient_failure_fn is not None:
                    on_transient_failure_fn()
                return
            worker = self._living.get(worker_device_name)
            cancelled = self._cluster.closure_queue._cancellation_mgr.is_cancelled
            lost = cluster_coordinator._is_worker_failure(error) and not cancelled
            if not lost or worker is None or len(self._living) == 1:
                raise
            del self._living[worker_device_name]
            if on_failure_fn is not None:
                on_failure_fn(error)
            worker.stop()

    def stop(self) -> None:
        """Do nothing: there is nothing to stop."""
