"""TensorFlow's servers are shut when a run is over, also where an interrupt falls into its end."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

pytestmark = pytest.mark.tensorflow
need("tensorflow")

from workbench.errors import ClusterError  # noqa: E402
from workbench.strategies.tensorflow import multi_worker_mirrored, parameter_server  # noqa: E402
from workbench.strategies.tensorflow.coordinator.servers import (  # noqa: E402
    hold_port,
    listening,
    shut,
)


class Interrupted:
    """A model that is being fetched when the interrupt comes."""

    weights: dict[str, Any] = {}  # noqa: RUF012

    def pack(self, *parts: Any) -> None:
        raise KeyboardInterrupt

    def unpack(self) -> None:
        self.weights = {}


def _bare(strategy: Any) -> Any:
    """A strategy in the middle of a run, as far as its end is concerned."""
    made = object.__new__(strategy)
    made.context = SimpleNamespace(failed=False, post=lambda *a: None, board=None)
    made.distribution = made.coordinator = made.closures = None
    made._model = made._loop = made._carried = made._fit = None
    made.rank = 0
    made.world_size = 2
    return made


@pytest.mark.parametrize(
    ("module", "name", "end"),
    [
        (multi_worker_mirrored, "MultiWorkerMirrored", "_leave"),
        (parameter_server, "ParameterServer", "_disconnect"),
    ],
    ids=["multi_worker_mirrored", "parameter_server"],
)
def test_an_interrupt_at_the_end_leaves_no_socket_open(
    module: Any, name: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Homecoming", Interrupted)
    monkeypatch.setattr(module, "reset", lambda: None)
    before = listening()
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(KeyboardInterrupt):
            getattr(_bare(getattr(module, name)), end)(before)
        assert listening() == before
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_connections_of_a_run_end_with_it() -> None:
    """A later run may get the same port: gRPC goes on with a connection that it has."""
    before = listening()
    with hold_port(None) as server, socket.create_server(("127.0.0.1", 0)) as others:
        client = socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5)
        accepted, _ = server.accept()
        elsewhere = socket.create_connection(others.getsockname(), 5)
        with client, accepted, elsewhere:
            shut({one for one in listening() - before if one[0] == server.fileno()})
            client.settimeout(5)
            assert client.recv(1) == b""
            elsewhere.sendall(b"?")


def test_engines_of_one_host_hold_different_ports() -> None:
    with hold_port(None) as free:
        first = free.getsockname()[1]
    ports = first, first + 1
    with hold_port(ports) as one, hold_port(ports) as other:
        assert {one.getsockname()[1], other.getsockname()[1]} == set(ports)
        with pytest.raises(ClusterError, match="WB-CLUSTER-046"):
            hold_port(ports)
