"""Finds out which process of a job this is, and lets all processes meet once.

Torchrun or TF_CONFIG says which process this is, or nothing does. All processes send who and where
they are, and rank 0 answers each:

    rank 1, 2, ... ── who, where ──> rank 0 ── each one's part ──> rank 1, 2, ...

PyTorch's processes meet in the store of torchrun's agent, or in one that rank 0 hosts.
TensorFlow's use the first address of TF_CONFIG: rank 0 listens there, and the others connect to it.
TensorFlow itself listens there only later.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from ..errors import ClusterError, PlanError
from ..shared import cluster_env

KEY = "WORKBENCH_JOB_KEY"
"""The variable with a secret that proves, with TF_CONFIG, that processes belong to the same job."""
LEAST_KEY = 16
MEET_S = 300.0
"""How long processes wait for each other, because some may still install or import."""
ACCEPT_S = 0.05
LOOK_S = 0.1
"""How often a process looks whether it was answered, or another meeting has begun."""
ANSWER_S = 10.0
"""How long a connection may take to send its message."""
About = dict[str, Any]
"""A process's description of itself, and the answer: plain data."""
_MEETING = "meeting"


@dataclass(frozen=True)
class Surroundings:
    """Which process of a job this is, as its environment says.

    Attributes:
        rank, world_size: Among all processes of the job, servers included.
        store: Host and port of the store in which PyTorch's processes meet; None: there is none.
        has_agent: Whether torchrun's agent hosts it; otherwise rank 0 does.
        attempt: How often torchrun's agent of this host has started again.
        addresses: The addresses in TF_CONFIG, in the order of the ranks; empty without it.
    """

    rank: int = 0
    world_size: int = 1
    store: tuple[str, int] | None = None
    has_agent: bool = False
    attempt: int = 0
    addresses: tuple[str, ...] = ()

    @staticmethod
    def found(environ: Mapping[str, str] = os.environ) -> Surroundings:
        """Return the values from the environment.

        Raises:
        PlanError: It contradicts itself, or is incomplete.
        """
        if environ.get("TF_CONFIG"):
            return _of_tensorflow(environ["TF_CONFIG"])
        if "RANK" not in environ:
            return Surroundings()
        try:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            store = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
            if not 0 <= rank < world_size:
                raise ValueError(f"RANK={rank}, but WORLD_SIZE={world_size}")
        except (KeyError, ValueError) as error:
            raise PlanError(
                "RANK is set, but a variable of torchrun is missing or not valid.",
                seen=f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error),
                allowed="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them",
                next_step="start the script with torchrun; for a single process, unset RANK",
                code="WB-PLAN-190",
            ) from None
        has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Surroundings(rank, world_size, store, has_agent, attempt)


def _of_tensorflow(text: str) -> Surroundings:
    """Return the tasks in TF_CONFIG: the chief first, then workers, then parameter servers."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        order = [
            (kind, i)
            for kind in ("chief", "worker", "ps")
            for i in range(len(cluster.get(kind, ())))
        ]
        rank = order.index((task["type"], int(task["index"])))
        addresses = tuple(str(cluster[kind][i]) for kind, i in order)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            "TF_CONFIG is not valid.",
            seen=f"{text[:200]} ({type(error).__name__}: {error})",
            allowed='{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            '"index": 0}}',
            next_step="correct TF_CONFIG, or unset it to train in one process",
            code="WB-PLAN-191",
        ) from None
    return Surroundings(rank, len(addresses), addresses=addresses)


# -- how the processes meet ------------------------------------------------------------------------


class Meeting(Protocol):
    """Where the processes of a job meet once: all send, rank 0 answers each."""

    def gather(self, about: About) -> list[About]:
        """On rank 0: return what every process sent, in the order of the ranks."""

    def hand_out(self, answers: Sequence[About]) -> None:
        """On rank 0: answer each of them."""

    def ask(self, about: About) -> About:
        """On the other ranks: send the description, and return the answer."""


class Alone:
    """A job of one process."""

    def gather(self, about: About) -> list[About]:
        """Return only this process's message."""
        return [about]

    def hand_out(self, answers: Sequence[About]) -> None:
        """Do nothing: there are no other processes."""

    def ask(self, about: About) -> About:
        """Never called: a single process is rank 0."""
        raise AssertionError(
            "internal error: this process asked another process, but the job has only one process"
        )


class InStore:
    """PyTorch's processes meet in the store that torchrun's agent hosts, or rank 0.

    torch is imported by name; rank 0's own store lives as long as this object. A store may still
    hold messages from before torchrun started again, and each of its agents counts its own
    attempts. So rank 0 opens each meeting under a new word, and each answer is to one message.
    """

    def __init__(self, where: Surroundings) -> None:
        assert where.store is not None
        dist = importlib.import_module("torch.distributed")
        host, port = where.store
        self._where = where
        hosts_it = where.rank == 0 and not where.has_agent
        listening = {}
        if hosts_it and _is_loopback(host):  # torch's own would listen on every interface
            listening["master_listen_fd"] = cluster_env.listening(host, (port, port)).detach()
        try:
            self._store = dist.TCPStore(
                host, port, is_master=hosts_it, wait_for_workers=False,
                timeout=timedelta(seconds=MEET_S), **listening,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            raise _no_meeting(f"{host}:{port}: {error}") from error
        self._ours = dist.PrefixStore("workbench/", self._store)
        self._word = secrets.token_hex(8)
        self._heard: list[str] = []  # words of the others, in the order of the ranks

    def gather(self, about: About) -> list[About]:
        """Return what every process says of itself."""
        self._ours.set(_MEETING, self._word)
        self._heard, abouts = [], [about]
        for rank in range(1, self._where.world_size):
            with self._hearing(f"rank {rank}"):
                word, said = json.loads(self._ours.get(f"{self._word}/{rank}"))
            self._heard.append(word)
            abouts.append(said)
        return abouts

    def hand_out(self, answers: Sequence[About]) -> None:
        """Answer each process."""
        for word, answer in zip(self._heard, answers[1:], strict=True):
            self._ours.set(word, json.dumps(answer))

    def ask(self, about: About) -> About:
        """Send it, and wait for the answer; send it again if another meeting begins."""
        end, said_in = time.monotonic() + MEET_S, b""
        with self._hearing("rank 0"):
            while time.monotonic() < end:
                meeting = self._ours.get(_MEETING)
                if meeting != said_in:
                    said_in, place = meeting, f"{meeting.decode()}/{self._where.rank}"
                    self._ours.set(place, json.dumps([self._word, about]))
                if self._ours.check([self._word]):
                    answer: About = json.loads(self._ours.get(self._word))
                    return answer
                time.sleep(LOOK_S)  # `wait` would log each time-out
        raise _no_meeting(f"no message from rank 0 within {MEET_S:g} s")

    @contextlib.contextmanager
    def _hearing(self, who: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _no_meeting(f"no message from {who} within {MEET_S:g} s ({error})") from error


class AtFirstAddress:
    """Processes of TF_CONFIG meet at the first address in it; TensorFlow listens there only later.

    Each message is a line of JSON and its HMAC under the job's key, so strangers are ignored.
    """

    def __init__(self, where: Surroundings, key: bytes) -> None:
        self._where, self._key = where, key
        host, _, port = where.addresses[0].rpartition(":")
        self._place = host, int(port)
        self._connections: dict[int, socket.socket] = {}

    def gather(self, about: About) -> list[About]:
        """Return the messages of all processes; strangers that send nothing do not cause delays."""
        found = {0: about}
        heard: queue.SimpleQueue[tuple[About | None, socket.socket]] = queue.SimpleQueue()
        silent: set[socket.socket] = set()
        host, port = self._place
        with (
            contextlib.ExitStack() as at_end,
            cluster_env.listening(socket.gethostbyname(host), (port, port)) as listener,
        ):
            at_end.callback(_hang_up, silent)
            listener.settimeout(ACCEPT_S)
            end = time.monotonic() + MEET_S
            while missing := set(range(self._where.world_size)) - set(found):
                if time.monotonic() > end:
                    raise _no_meeting(f"no message from ranks {sorted(missing)}")
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    silent.add(connection)
                    threading.Thread(
                        target=self._hear, args=(connection, heard), daemon=True
                    ).start()
                while not heard.empty():
                    said, connection = heard.get()
                    silent.discard(connection)
                    rank = -1 if said is None else int(said.get("rank", -1))
                    if said is None or rank not in missing:  # not one of ours
                        connection.close()
                        continue
                    missing.discard(rank)
                    found[rank], self._connections[rank] = said, connection
        return [found[rank] for rank in range(self._where.world_size)]

    def _hear(
        self,
        connection: socket.socket,
        heard: queue.SimpleQueue[tuple[About | None, socket.socket]],
    ) -> None:
        connection.settimeout(ANSWER_S)
        heard.put((self._receive(connection), connection))

    def hand_out(self, answers: Sequence[About]) -> None:
        """Answer each process, and close its connection."""
        for rank, connection in self._connections.items():
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_S)
                connection.sendall(self._packed(answers[rank]))
                connection.recv(1)  # they close first, so that the port is free for TensorFlow
        self._connections.clear()

    def ask(self, about: About) -> About:
        """Send it, and wait for the answer."""
        end, why = time.monotonic() + MEET_S, ""
        while time.monotonic() < end:
            try:
                with socket.create_connection(self._place, 5.0) as connection:
                    connection.settimeout(MEET_S)
                    connection.sendall(self._packed(about))
                    answer = self._receive(connection)
                if answer is not None:
                    return answer
                why = f"no answer that is signed with this process's {KEY}"
            except OSError as error:
                why = str(error)
            time.sleep(0.1)
        raise _no_meeting(f"{self._where.addresses[0]}: {why}")

    def _packed(self, content: About) -> bytes:
        line = json.dumps(content).encode()
        return hmac.digest(self._key, line, "sha256").hex().encode() + b" " + line + b"\n"

    def _receive(self, connection: socket.socket) -> About | None:
        """Return a received message; None if it is not signed with this job's key."""
        received = bytearray()
        with contextlib.suppress(OSError):
            while not received.endswith(b"\n") and len(received) < 8 << 20:
                part = connection.recv(1 << 16)
                if not part:
                    break
                received += part
        proof, _, line = bytes(received).rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, hmac.digest(self._key, line, "sha256").hex().encode()):
            return None
        found: About = json.loads(line)
        return found


def meeting_of(where: Surroundings) -> Meeting:
    """Return how this job's processes meet.

    Raises:
        PlanError: They are TensorFlow's and have no key, or the key is short.
        ClusterError: The store cannot be reached.
    """
    key = os.environ.get(KEY, "")
    if len(key) < LEAST_KEY and (key or len(where.addresses) > 1):
        raise PlanError(
            f"The key in the environment variable {KEY} is "
            + (
                "too short. With this key, processes prove that they belong to the same job."
                if key
                else "missing. With this key, TensorFlow's processes find each other, and prove "
                "that they belong to the same job."
            ),
            seen=f"{len(key)} characters" if key else "nothing",
            allowed=f"the same key in each process, with at least {LEAST_KEY} characters",
            next_step="run this command once: "
            f"`export {KEY}=$(python -c 'import secrets; print(secrets.token_hex(16))')`. Then "
            "pass this key to all processes. `workbench run DIR` makes the key and passes it "
            "automatically",
            code="WB-PLAN-192",
        )
    if where.world_size == 1:
        return Alone()
    return AtFirstAddress(where, key.encode()) if where.addresses else InStore(where)


def _hang_up(connections: set[socket.socket]) -> None:
    for one in connections:
        with one, contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # its thread reads no more


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _no_meeting(seen: str) -> ClusterError:
    return ClusterError(
        "This process received no valid message from at least one other process of the job.",
        seen=seen,
        allowed=f"all processes of the job must start within {MEET_S:g} s",
        next_step="look at the logs of the other processes: one of them may have failed earlier. "
        "If the hosts have a firewall, open the port MASTER_PORT (or the port of the first "
        f"process in TF_CONFIG). With TF_CONFIG, every process also needs the same {KEY}",
        code="WB-CLUSTER-080",
    )
