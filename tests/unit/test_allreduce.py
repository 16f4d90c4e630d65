"""All-reduce algorithms and compression, on workers that are threads of this process."""

from __future__ import annotations

import math
import queue
import select
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import catalog
from workbench.engine.transport.peers import Peers
from workbench.errors import PlanError

torch = pytest.importorskip("torch")

from workbench.strategies.torch.allreduce import (  # noqa: E402
    ALGORITHMS,
    BACKEND,
    AllReduce,
    auto,
    compression,
)
from workbench.strategies.torch.allreduce import links as links_module  # noqa: E402
from workbench.strategies.torch.allreduce.algorithms import form_groups  # noqa: E402  # noqa: E402
from workbench.strategies.torch.allreduce.auto import Aside  # noqa: E402  # noqa: E402
from workbench.strategies.torch.allreduce.links import Links  # noqa: E402

pytestmark = pytest.mark.torch
OWN = [name for name in ALGORITHMS if name != BACKEND]


class Done:
    def wait(self) -> None:
        pass


class Received:
    def __init__(self, into: Any, source: queue.Queue) -> None:
        self._into, self._source = into, source

    def wait(self) -> None:
        message = self._source.get(timeout=20)
        assert message.shape == self._into.shape, "a message must be as long as what waits for it"
        self._into.copy_(message)


class Group:
    """One thread's end of a group: what Links uses of a process group."""

    def __init__(self, rank: int, lines: dict[tuple[int, int], queue.Queue], size: int) -> None:
        self._rank, self._lines, self._size = rank, lines, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "gloo")

    def send(self, tensors: list[Any], to: int, tag: int) -> Done:
        assert tensors[0].is_contiguous()
        self._lines[self._rank, to].put(tensors[0].clone())
        return Done()

    def recv(self, tensors: list[Any], source: int, tag: int) -> Received:
        return Received(tensors[0], self._lines[source, self._rank])


def connect_all(n: int) -> list[Peers]:
    """Return a worker's end of each pair's socket, for every worker."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(n)]
    for a in range(n):
        for b in range(a):
            ends[a][b], ends[b][a] = socket.socketpair()
    return [Peers(own) for own in ends]


@pytest.fixture(params=["group", "sockets"])
def together(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., list[Any]]:
    """Return a function that runs `work(links)` on n threads and gives what each returned."""
    monkeypatch.setattr(links_module.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(Links, "agree", lambda self, tensor: None)

    def run(n: int, work: Callable[[Links], Any], hosts: tuple[str, ...] = ()) -> list[Any]:
        lines = {(a, b): queue.Queue() for a in range(n) for b in range(n)}
        results: list[Any] = [None] * n
        peers = connect_all(n) if request.param == "sockets" else [None] * n

        def one(rank: int) -> None:
            results[rank] = work(Links(Group(rank, lines, n), hosts=hosts, peers=peers[rank]))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(line.empty() for line in lines.values()), "a message nobody received"
        for own in peers:
            if own is not None:
                unread = select.select(list(own._sockets.values()), [], [], 0)[0]
                assert not unread, "a message nobody received"
        for own in peers:
            if own is not None:
                own.close()
        return results

    return run


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("n", range(1, 9))
def test_everybody_ends_with_the_sum_to_the_last_bit(
    together: Callable[..., list[Any]], name: str, n: int
) -> None:
    for numbers in (0, 1, 5, 1000):

        def work(links: Links, numbers: int = numbers) -> Any:
            flat = torch.randn(numbers, generator=torch.Generator().manual_seed(links.rank))
            AllReduce(name, links)(flat)
            return flat

        sums = together(n, work)
        truth = sum(
            torch.randn(numbers, generator=torch.Generator().manual_seed(rank)).double()
            for rank in range(n)
        )
        assert torch.allclose(sums[0].double(), truth, atol=1e-5)
        assert all(torch.equal(other, sums[0]) for other in sums)


@pytest.mark.parametrize("name", OWN)
def test_the_mean_is_the_sum_over_the_number_of_workers(
    together: Callable[..., list[Any]], name: str
) -> None:
    def work(links: Links) -> Any:
        flat = torch.arange(5.0) + links.rank
        AllReduce(name, links).mean(flat)
        return flat

    for mean in together(4, work):
        assert torch.allclose(mean, torch.arange(5.0) + 1.5)


def sent(together: Callable[..., list[Any]], name: str, n: int, **keywords: Any) -> list[float]:
    def work(links: Links) -> float:
        AllReduce(name, links)(torch.zeros(240))
        return links.sent_bytes

    return together(n, work, **keywords)


def test_what_is_sent_is_counted(together: Callable[..., list[Any]]) -> None:
    size = 240 * 4
    assert sent(together, "ring", 4) == [size * 1.5] * 4
    assert sent(together, "recursive_doubling", 4) == [2 * size] * 4
    assert sent(together, "recursive_doubling", 3) == [2 * size, size, size]
    assert sent(together, "reduce_to_one", 4) == [3 * size, size, size, size]
    # Two leaders: a ring of two sends the tensor once; then it goes to the member.
    assert sent(together, "hierarchical", 4) == [2 * size, size, 2 * size, size]
    hosts = ("a", "b", "b", "b")
    assert sent(together, "hierarchical", 4, hosts=hosts) == [size, 3 * size, size, size]


def test_groups_are_hosts_or_blocks() -> None:
    assert form_groups(4, ["", "", "", ""]) == [[0, 1], [2, 3]]
    assert form_groups(5, [""] * 5) == [[0, 1, 2], [3, 4]]
    assert form_groups(4, ["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert form_groups(1, [""]) == [[0]]


def test_messages_are_held_back_by_the_simulated_link(
    together: Callable[..., list[Any]],
) -> None:
    def work(links: Links) -> list[int]:
        held: list[int] = []
        slow = Links(links.group, travel=held.append, peers=links.peers)
        AllReduce("hierarchical", slow)(torch.zeros(6))
        return held

    # To the leader; the leaders' ring in halves, and the sum handed out.
    assert together(4, work) == [[12, 12, 24], [24], [12, 12, 24], [24]]


def test_another_algorithm_must_beat_the_backend_clearly() -> None:
    assert auto.fastest({BACKEND: 1.0, "ring": 0.6}).name == BACKEND
    assert auto.fastest({BACKEND: 1.0, "ring": 0.5, "reduce_to_one": 0.4}).name == "reduce_to_one"
    assert auto.fastest({"ring": 0.5, "reduce_to_one": 0.6}).name == "ring"


@pytest.mark.parametrize(
    ("takes_s", "tried", "chosen"),
    [
        pytest.param({}, dict.fromkeys(ALGORITHMS, 1 + auto.ROUNDS), BACKEND, id="near"),
        pytest.param(
            {"ring": 0.9 * auto.NOISE_S / 2, "reduce_to_one": 5 * auto.NOISE_S},
            {**dict.fromkeys(ALGORITHMS, 1 + auto.ROUNDS), "reduce_to_one": 1},
            BACKEND,
            id="one is hopeless",
        ),
        pytest.param(dict.fromkeys(ALGORITHMS, 3.0), {BACKEND: 1}, BACKEND, id="slow network"),
        pytest.param(
            {BACKEND: 0.8, "ring": 0.2, "hierarchical": 1.6},
            {BACKEND: 1, "ring": 1, "hierarchical": 1},
            "ring",
            id="time is up",
        ),
        pytest.param(
            dict.fromkeys(ALGORITHMS, 0.12), dict.fromkeys(ALGORITHMS, 3), BACKEND, id="few rounds"
        ),
    ],
)
def test_trying_the_algorithms_takes_about_two_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch, takes_s: dict[str, float], tried: dict[str, int], chosen: str
) -> None:
    runs: dict[str, int] = {}

    class Entrant(SimpleNamespace):
        def __call__(self, probe: Any) -> None:
            runs[self.name] = runs.get(self.name, 0) + 1
            clock[0] += takes_s.get(self.name, 1e-3)

    clock = [0.0]
    monkeypatch.setattr(auto.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(auto, "_compute", lambda: None)
    monkeypatch.setattr(auto, "AllReduce", lambda name, links: Entrant(name=name))
    monkeypatch.setattr(auto.dist, "all_reduce", lambda *a, **k: None)
    found = auto.race(
        torch.zeros(1), SimpleNamespace(group=None), SimpleNamespace(run=lambda task: task()),
        list(ALGORITHMS), rounds=auto.ROUNDS, budget_s=auto.BUDGET_S,
    )  # fmt: skip
    assert runs == tried
    assert auto.fastest(found).name == chosen


def test_the_catalog_offers_every_algorithm() -> None:
    option = catalog.lookup("mirrored").option("allreduce")
    assert set(option.choices) == {"auto", *ALGORITHMS}


SHAPES = [torch.Size([12, 10]), torch.Size([10]), torch.Size([3, 4, 6]), torch.Size([])]
NUMBERS = sum(shape.numel() for shape in SHAPES)
KINDS = ["fp16", "bf16", "topk:0.05", "topk:1", "powersgd:1", "powersgd:3", "powersgd:50"]


def gradient(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(NUMBERS, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_only_late(together: Callable[..., list[Any]], kind: str, n: int) -> None:
    """Error feedback: what was applied so far and what is held back add up to the gradients."""
    steps = 12

    def work(links: Links) -> tuple[Any, Any]:
        mean = compression.make_compression(kind, AllReduce("ring", links), SHAPES)
        applied = torch.zeros(NUMBERS, dtype=torch.float64)
        for step in range(steps):
            flat = gradient(links.rank, step)
            mean(flat)
            applied += flat
        return applied, mean.error

    results = together(n, work)
    assert all(torch.equal(applied, results[0][0]) for applied, _ in results)
    held_back = sum(error for _, error in results) / n
    truth = sum(gradient(rank, step) for rank in range(n) for step in range(steps)) / n
    # The sum of halves is itself rounded to 16 bits, outside the feedback.
    tolerance = {"fp16": 2e-2, "bf16": 2e-1}.get(kind, 1e-12)
    assert (results[0][0] + held_back - truth).abs().max() <= tolerance
    if kind in ("topk:1", "powersgd:50"):
        assert held_back.abs().max() == 0
    else:
        assert held_back.abs().max() > 1e-5


def test_the_error_stays_bounded(together: Callable[..., list[Any]]) -> None:
    def work(links: Links) -> list[float]:
        mean = compression.make_compression("topk:0.2", AllReduce("ring", links), SHAPES)
        norms = []
        for step in range(200):
            mean(gradient(links.rank, step))
            norms.append(float(mean.error.norm()))
        return norms

    norms = together(2, work)[0]
    assert max(norms[100:]) < 1.5 * max(norms[50:100])


def test_a_matrix_of_low_rank_goes_through_whole(together: Callable[..., list[Any]]) -> None:
    shape = torch.Size([20, 30])

    def work(links: Links) -> float:
        mean = compression.make_compression("powersgd:1", AllReduce("ring", links), [shape])
        matrix = torch.arange(20.0).double()[:, None] * torch.linspace(-1, 1, 30).double()
        flat = (matrix * (1 + links.rank)).reshape(-1)
        mean(flat)
        return float((flat.view(shape) - 1.5 * matrix).abs().max())

    assert max(together(2, work)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "share"),
    [("fp16", 0.5), ("bf16", 0.5), ("topk:0.1", 0.1 * 2), ("powersgd:1", 50 / 600)],
)
def test_compressed_bytes_are_counted(
    together: Callable[..., list[Any]], kind: str, share: float
) -> None:
    shape = torch.Size([20, 30])

    def work(links: Links) -> float:
        mean = compression.make_compression(kind, AllReduce("ring", links), [shape])
        mean(torch.ones(600))
        return links.sent_bytes

    whole = 600 * 4  # what a ring of two sends
    assert together(2, work)[0] == math.ceil(whole * share)


def test_an_infinite_gradient_does_not_stay_behind(together: Callable[..., list[Any]]) -> None:
    def work(links: Links) -> tuple[bool, bool]:
        mean = compression.make_compression("fp16", AllReduce("ring", links), SHAPES)
        flat = torch.full((NUMBERS,), math.inf)
        mean(flat)
        return bool(flat.isinf().all()), bool(mean.error.isfinite().all())

    assert together(2, work) == [(True, True)] * 2


def test_the_message_is_as_large_as_what_is_sent(together: Callable[..., list[Any]]) -> None:
    for kind in ("none", "fp16", "powersgd:2"):

        def work(links: Links, kind: str = kind) -> float:
            all_reduce = AllReduce("recursive_doubling", links)
            mean = compression.make_compression(kind, all_reduce, SHAPES) or all_reduce.mean
            mean(torch.ones(NUMBERS))
            return links.sent_bytes

        numel, dtype = compression.message_like(kind, SHAPES, torch.float32)
        q_bytes = 2 * (10 + 24) * 4 if kind == "powersgd:2" else 0  # the second message
        size_bytes = numel * dtype.itemsize
        assert together(2, work) == [size_bytes + q_bytes] * 2


@pytest.mark.parametrize(
    "text", ["none", "fp16", "bf16", "powersgd:1", "powersgd:16", "topk:1", "topk:0.01", "topk:.5",
             "topk:1e-3"],
)  # fmt: skip
def test_compress_reads_what_is_typed(text: str) -> None:
    assert catalog.lookup("mirrored").settings({"compress": text})["compress"] == text


@pytest.mark.parametrize(
    "text", ["fp8", "powersgd", "powersgd:0", "powersgd:1.5", "topk:0", "topk:0.0", "topk:2",
             "topk:-1", "topk:", "fp16:2", "topk:1e3"],
)  # fmt: skip
def test_compress_refuses_the_rest(text: str) -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-003[\s\S]*topk:FRACTION"):
        catalog.lookup("mirrored").settings({"compress": text})


def test_what_fails_aside_is_raised_here_and_the_thread_ends() -> None:
    before = threading.active_count()
    aside = Aside()
    ran: list[str] = []
    aside.run(lambda: ran.append(threading.current_thread().name))
    assert ran == ["workbench-links"]
    with pytest.raises(ZeroDivisionError):
        aside.run(lambda: 1 / 0)
    aside.run(lambda: ran.append("goes on"))
    assert ran[-1] == "goes on"
    aside.close()
    aside.close()
    assert threading.active_count() == before
