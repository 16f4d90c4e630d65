"""While each strategy trains, nothing of ours can be reached from elsewhere, or by other users.

The whole module runs with umask 0: what is private is private because we say so.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import listening
import pytest
import zmq
from ipyparallel import serialize
from jupyter_client.session import Session
from needs import need
from notebook_shell import WAIT_S, soon

import workbench as wb
from workbench import catalog
from workbench.history import folders

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

CELL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
wb.fit(model, wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7)
"""
EXTRA = [
    ("mirrored", {"allreduce": "ring"}),
    ("central_storage", {"link": "tcp"}),
    ("parameter_server", {"link": "unix", "servers": 2}),
]
CASES = [(entry.name, {}) for entry in catalog.strategies("torch")] + EXTRA


@pytest.fixture(scope="module", autouse=True)
def no_umask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    home = tmp_path_factory.mktemp("home") / "made" / "by us"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_HOME", str(home))
        before = os.umask(0)
        yield
        os.umask(before)


@pytest.fixture(scope="module")
def cluster(no_umask: None) -> Iterator[wb.Cluster]:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    with wb.Cluster(2) as cluster:
        cluster.shm_before = before  # type: ignore[attr-defined]
        yield cluster


@pytest.mark.parametrize(
    ("strategy", "options"), CASES, ids=["-".join([n, *map(str, o.values())]) for n, o in CASES]
)
def test_every_strategy_listens_on_loopback_alone(
    cluster: wb.Cluster, strategy: str, options: dict[str, Any]
) -> None:
    run = cluster.run(CELL, strategy=strategy, options=options)
    assert soon(lambda: run.history.totals.steps > 2 or run.is_over), run.state
    assert not run.is_over, run.error
    ports, sockets = set(listening.open_ports()), listening.unix_sockets()
    exposed = listening.beyond_loopback()
    within_reach = {path for path in sockets if path.startswith("/")}
    within_reach = {path for path in within_reach if _is_ours(path) and _reachable(path)}
    abstract = {path for path in sockets if path.startswith(("@", "\0"))}
    shm = set(os.listdir("/dev/shm")) - cluster.shm_before  # type: ignore[attr-defined]
    loose_shm = [n for n in shm if _mode(Path("/dev/shm", n)) & 0o077]
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    assert exposed == set()
    assert within_reach == set()
    assert abstract == set()
    assert loose_shm == []
    # The instrument sees what is there: controller, engines, and the store where there is a group.
    names = {name for name, _, _ in ports}
    assert "engine-0" in names
    assert len(ports) >= 12


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0


def _is_ours(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.getuid()
    except OSError:  # gone already: it cannot be reached either
        return False


def _reachable(path: str) -> bool:
    return listening.reachable_by_others(path)


def test_folders_and_files_are_the_users_alone_whatever_the_umask(cluster: wb.Cluster) -> None:
    folder = cluster.engine_set.folder()
    assert listening.loose_folders(folder) == []
    connection = json.loads((folder / "security" / "ipcontroller-client.json").read_text())
    keys = [connection["key"].encode(), cluster.engine_set.router.key.hex().encode()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    secret = [path for path in files if any(key in path.read_bytes() for key in keys)]
    assert len(secret) >= 2
    assert {_mode(path) for path in secret} == {0o600}
    root = folders.runs_root()
    assert list(root.iterdir())
    assert listening.loose_folders(root.parent) == []


def test_the_controller_takes_nothing_without_its_key(cluster: wb.Cluster) -> None:
    """ipyparallel unpickles arguments; who has no key does not get that far."""
    folder = cluster.engine_set.folder()
    known = json.loads((folder / "security" / "ipcontroller-client.json").read_text())
    right, wrong = folder / "with-the-key", folder / "without-it"
    _send_bomb(known, cluster.engines[0].uuid, Session(key=known["key"].encode()), right)
    assert soon(right.exists)  # so the bomb is one, and only the key is in its way
    _send_bomb(known, cluster.engines[0].uuid, Session(key=b"guessed"), wrong)
    task = cluster.execute("print('still here')")
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    assert not wrong.exists()


def _send_bomb(known: dict[str, Any], uuid: str, session: Session, marker: Path) -> None:
    """Have every socket of the controller asked to run what unpickles to `mkdir(marker)`."""
    bomb = serialize.pack_apply_message(_Bomb(str(marker)), (), {})
    with zmq.Context() as context:
        for name in ("mux", "task", "control"):
            port = known[name][0] if isinstance(known[name], list) else known[name]
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 500)
                socket.connect(f"{known['interface']}:{port}")
                target = [] if name == "task" else [uuid.encode()]
                message = session.msg("apply_request", {}, metadata={"targets": []})
                session.send(socket, message, ident=target, buffers=bomb)


class _Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)
