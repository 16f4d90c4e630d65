"""TensorFlow's servers are shut when a run is over, also where an interrupt falls into its end."""

from __future__ import annotations

import importlib
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

from workbench.errors import ClusterError

pytestmark = pytest.mark.tensorflow
need("tensorflow")


@pytest.fixture
def servers() -> Any:
    """Import it here: whoever only collects tests need not load TensorFlow."""
    from workbench.strategies.tensorflow.coordinator import servers

    return servers


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
        ("multi_worker_mirrored", "MultiWorkerMirrored", "_leave"),
        ("parameter_server", "ParameterServer", "_disconnect"),
    ],
)
def test_an_interrupt_at_the_end_leaves_no_socket_open(
    module: str, name: str, end: str, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = importlib.import_module(f"workbench.strategies.tensorflow.{module}")
    monkeypatch.setattr(strategy, "Homecoming", Interrupted)
    monkeypatch.setattr(strategy, "reset", lambda: None)
    before = servers.listening()
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(KeyboardInterrupt):
            getattr(_bare(getattr(strategy, name)), end)(before)
        assert servers.listening() == before
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_connections_of_a_run_end_with_it(servers: Any) -> None:
    """A later run may get the same port: gRPC goes on with a connection that it has."""
    before = servers.listening()
    with servers.hold_port(None) as server, socket.create_server(("127.0.0.1", 0)) as others:
        client = socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5)
        accepted, _ = server.accept()
        elsewhere = socket.create_connection(others.getsockname(), 5)
        with client, accepted, elsewhere:
            servers.shut({one for one in servers.listening() - before if one[0] == server.fileno()})
            client.settimeout(5)
            assert client.recv(1) == b""
            elsewhere.sendall(b"?")


def test_engines_of_one_host_hold_different_ports(servers: Any) -> None:
    with servers.hold_port(None) as free:
        first = free.getsockname()[1]
    ports = first, first + 1
    with servers.hold_port(ports) as one, servers.hold_port(ports) as other:
        assert {one.getsockname()[1], other.getsockname()[1]} == set(ports)
        with pytest.raises(ClusterError, match="WB-CLUSTER-046"):
            servers.hold_port(ports)
