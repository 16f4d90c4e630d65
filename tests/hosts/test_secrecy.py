"""What goes between notebook and hosts cannot be read, and nobody else gets a word in."""

from __future__ import annotations

import base64
import json
import os
import stat
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from hosts.local_slurm import PORT, SLURM_NEEDS, LocalSlurm
from hosts.on_the_wire import Wire, listened_in, listeners
from hosts.simulated_hosts import ADDRESSES, KERNEL, SimulatedHosts, missing
from notebook_shell import WAIT_S, soon
from zmq.utils import z85

import workbench as wb
from workbench.cluster.hosts import wire as wire_of_agents
from workbench.devices.limits import ExposureWarning

SOURCE, SHOWN = "told-in-a-cell", "shown-by-a-cell"
PORTS = (24500, 24600)
SENT = 1234.5678
"""A number that a worker sends to the other one."""
CELL = f"""
import torch
import torch.distributed as dist
secret = "{SOURCE}"
print("-".join(["shown", "by", "a", "cell"]))
x = torch.full((64,), {SENT} if rank == 0 else 0.0, dtype=torch.float64)
dist.broadcast(x, 0)
"""
TRAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
wb.fit(model, wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7)
"""
KERAS = """
import keras
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
wb.fit(model, wb.data.synthetic(256, shape=(8,), classes=4), batch_size=32,
       loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps=10**7,
       optimizer=keras.optimizers.SGD(0.01))
"""


@pytest.fixture(scope="module")
def wire(reached: SimulatedHosts) -> Iterator[Wire]:
    with listened_in() as wire:
        yield wire


@pytest.fixture(scope="module")
def cluster(wire: Wire) -> Iterator[wb.Cluster]:
    with pytest.warns(match="private network"):
        cluster = wb.Cluster(2, launcher="ssh", on="xh1:1,xh2:1", ports=PORTS)
    with cluster:
        yield cluster


def secrets_of(cluster: wb.Cluster) -> dict[str, bytes]:
    """Return the keys of a cluster, by what they are."""
    agents = cluster.engine_set.hosted.agents
    assert agents is not None
    key, word = cluster.engine_set.router.key, bytes.fromhex(agents.join.word)
    security = Path(cluster.engine_set.folder()) / "security"
    found = {
        "control key": key,
        "control key, in hex": key.hex().encode(),
        "control key, in base64": base64.b64encode(key),
        "pass": word,
        "pass, in hex": word.hex().encode(),
        "join": agents.join.to_text().encode(),
    }
    for file in security.glob("*.json"):  # ipyparallel signs nothing where CURVE does both
        about = json.loads(file.read_text())
        for name in ("key", "curve_serverkey", "curve_publickey", "curve_secretkey"):
            if about.get(name):
                found[f"{name} of {file.name}"] = about[name].encode()
            if name != "key" and about.get(name):
                found[f"{name} of {file.name}, raw"] = z85.decode(about[name])
    return found


def shown_by_ps(secret: dict[str, bytes]) -> list[tuple[str, str]]:
    """Return the secrets that are arguments of any process, each with the process's name."""
    lines = {
        one: "\0".join(one.info["cmdline"] or ()).encode()
        for one in psutil.process_iter(["cmdline", "name"])
    }
    return [
        (name, str(one.info["name"]))
        for one, line in lines.items()
        for name, word in secret.items()
        if word in line
    ]


def test_neither_keys_nor_cells_nor_what_they_print_can_be_read_on_the_way(
    cluster: wb.Cluster, wire: Wire
) -> None:
    task = cluster.execute(CELL)
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    assert soon(lambda: wire.carries(struct.pack("<d", SENT)))  # gloo: see docs/security.md
    words = {**secrets_of(cluster), "source": SOURCE.encode(), "output": SHOWN.encode()}
    assert any(name.startswith("curve_serverkey of") for name in words)
    assert {name: seen for name, word in words.items() if (seen := wire.carries(word))} == {}
    assert wire.mechanisms() == {"CURVE"}


def test_no_secret_is_an_argument_of_a_process_or_in_a_file_for_others(
    cluster: wb.Cluster, reached: SimulatedHosts
) -> None:
    secret = secrets_of(cluster)
    assert shown_by_ps(secret) == []
    folders = [p for host in ADDRESSES for p in reached.path(host, "/tmp").glob("workbench-*")]
    assert len(folders) == 2
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in (one for one in folder.rglob("*") if one.is_file()):
            if any(word in file.read_bytes() for word in secret.values()):
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_who_reads_the_pass_later_gets_nothing_for_it(cluster: wb.Cluster) -> None:
    agents = cluster.engine_set.hosted.agents
    assert agents is not None
    word = bytes.fromhex(agents.join.word)
    facts = wire_of_agents.HostFacts("thief", "t", "10.0.0.9", 1, 1, 1, {})
    arrived = wire_of_agents.Arrived(place=7, slots=1, facts=facts)
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.curve_serverkey = agents.join.key.encode()
        thief.curve_publickey, thief.curve_secretkey = zmq.curve_keypair()
        thief.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        thief.connect(agents.join.url)
        thief.send_multipart(wire_of_agents.pack(arrived, word))
        said = wire_of_agents.unpack_down(thief.recv_multipart(), word)
    assert isinstance(said, wire_of_agents.End)
    assert "thief" in cluster.status().text()
    assert [host.name for host in agents.living] == ["xh1", "xh2"]
    task = cluster.execute("import torch.distributed as dist; dist.barrier()")
    assert task.over.wait(WAIT_S)
    assert task.failure() is None


@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_while_torch_trains_sockets_listen_on_the_addresses_of_the_cluster_alone(
    cluster: wb.Cluster, reached: SimulatedHosts, strategy: str
) -> None:
    run = cluster.run(TRAIN, strategy=strategy)
    assert soon(lambda: run.history.totals.steps > 2 or run.is_over), run.state
    assert not run.is_over, run.error
    found = listeners(reached, family())
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    if os.environ.get("SHOW"):
        print(*sorted(map(str, found)), sep="\n")
    beyond = {(one.host, one.address) for one in found if one.beyond}
    others = {one.process for one in found if one.beyond and one.port not in range(*PORTS)}
    assert all(name.startswith("engine") for name in others)  # gloo's
    assert beyond <= {("here", KERNEL), *ADDRESSES.items()}
    assert ("here", KERNEL) in beyond
    assert set(ADDRESSES.items()) & beyond


def family() -> list[int]:
    kernel = psutil.Process()
    return [kernel.pid, *(one.pid for one in kernel.children(recursive=True))]


def test_files_with_secrets_are_gone_with_the_cluster(reached: SimulatedHosts) -> None:
    def folders() -> set[Path]:
        return {p for host in ADDRESSES for p in reached.path(host, "/tmp").glob("workbench-*")}

    before = folders()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExposureWarning)
        cluster = wb.Cluster(2, launcher="ssh", on="xh1:1,xh2:1")
    made = folders() - before
    cluster.stop()
    assert len(made) == 2
    assert soon(lambda: not made & folders())


@pytest.fixture(scope="module")
def keras(reached: SimulatedHosts) -> Iterator[wb.Cluster]:
    with pytest.warns(match="private network"):
        cluster = wb.Cluster(
            2, launcher="ssh", on="xh1:1,xh2:1", framework="tensorflow", ports=PORTS
        )
    with cluster:
        yield cluster


@pytest.mark.tensorflow
@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "parameter_server"])
def test_while_tensorflow_trains_its_own_servers_alone_listen_everywhere(
    keras: wb.Cluster, reached: SimulatedHosts, strategy: str
) -> None:
    before = {one for one in listeners(reached, family()) if one.everywhere}
    run = keras.run(KERAS, strategy=strategy)
    assert soon(lambda: run.history.totals.steps > 2 or run.is_over, 90), run.state
    assert not run.is_over, run.error
    found = listeners(reached, family())
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    if os.environ.get("SHOW"):
        print(*sorted(map(str, found)), sep="\n")
    everywhere = {one for one in found if one.everywhere}
    assert before == set()
    assert {one.host for one in everywhere} <= set(ADDRESSES)  # docs/security.md names them
    assert all(one.process.startswith("engine") for one in everywhere)
    beyond = {(one.host, one.address) for one in found - everywhere if one.beyond}
    assert beyond <= {("here", KERNEL), *ADDRESSES.items()}
    assert soon(lambda: not [one for one in listeners(reached, family()) if one.everywhere])


def test_a_job_of_slurm_shows_its_pass_to_its_owner_alone(reached: SimulatedHosts) -> None:
    if why := missing(SLURM_NEEDS):
        pytest.skip(why)
    queues = LocalSlurm(reached)
    queues.down()
    queues.up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", queues.environment["SLURM_CONF"])
        with listened_in() as wire:
            with pytest.warns(match="private network"):
                cluster = wb.Cluster(2, launcher="slurm", nodes=2)
            with cluster:
                secret = secrets_of(cluster)
                assert cluster.execute(CELL).over.wait(WAIT_S)
                assert shown_by_ps(secret) == []
                agents = cluster.engine_set.hosted.agents
                assert agents is not None
                for host in agents.living:
                    environ = os.stat(f"/proc/{host.facts.pid}/environ")
                    assert stat.S_IMODE(environ.st_mode) == 0o400
                (job,) = queues.jobs()
                script = queues.call("scontrol", "write", "batch_script", str(job), "-")
                assert agents.join.to_text() in script  # so its owner can: see docs/security.md
        seen = {name: flows for name, word in secret.items() if (flows := wire.carries(word))}
        assert set(seen) == {"join"}  # in Slurm's own messages, as docs/security.md says
        assert {flow[3] for flow in seen["join"]} == {PORT + 1}  # slurmd
        assert wire.mechanisms() == {"CURVE"}
        queues.cancel_all()
