"""Pull and push of 100 MB by 2 workers on one host: our links against torch RPC and gloo send/recv.

Every rival has one server and the workers as separate processes. In each round a worker copies the
whole buffer into memory that is already allocated, and sends a whole buffer back, which the server
stores. No process computes. All are measured alternately, several times, so other work disturbs all
of them equally. The table shows medians, and ratios of medians. The last buffers are checked.

    python benchmarks/bench_parameter_server.py --mb 100 --workers 2 --rounds 10 --turns 5
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

KEY = b"benchmark" * 4


def store_of(port: int, *, host: bool = False) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=host, wait_for_workers=False)


def measured(rank: int, rounds: int, ready: Any, queue: Any, once: Callable[[], None]) -> None:
    """Warm up, wait for the other workers, do the rounds, report the seconds."""
    for _ in range(2):
        once()
    ready.wait()
    began = time.perf_counter()
    for _ in range(rounds):
        once()
    queue.put((rank, began, time.perf_counter()))


# -- ours ------------------------------------------------------------------------------------------


def links_server(args: Any, port: int, way: str) -> None:
    from workbench.engine.transport import Hub

    hub, boxes = Hub(args.workers, KEY), {}
    hub.admit(store_of(port), 0, "127.0.0.1")
    board: Any = None
    while (item := hub.next()) is not None:
        rank, message = item
        if message.kind == "open":
            if board is None:
                board = hub.board(message.meta["size_bytes"])
                board[:] = 7
            boxes[rank] = hub.mailbox(rank, len(board), shared=message.meta["shared"])
            hub.reply(rank, "opened")
            hub.hand_over(rank)
        elif message.kind == "push":
            hub.reply(rank, "params", board=True)
    hub.close()


def links_worker(args: Any, port: int, way: str, rank: int, ready: Any, queue: Any) -> None:
    from workbench.engine.transport import connect

    size = args.mb * 1_000_000
    gradient, landing = np.full(size, rank + 1, np.uint8), np.zeros(size, np.uint8)
    (link,) = connect(store_of(port), 1, rank, KEY, way)
    link.begin(size, {})
    link.opened()

    def once() -> None:
        link.push("push", {}, [gradient])
        link.read(link.receive(), [landing])

    measured(rank, args.rounds, ready, queue, once)
    assert (landing == 7).all()
    link.close()


# -- gloo ------------------------------------------------------------------------------------------


def gloo_group(args: Any, port: int, rank: int) -> Any:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.PrefixStore("gloo", store_of(port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.workers + 1)
    return dist


def gloo_server(args: Any, port: int, way: str) -> None:
    import torch

    dist = gloo_group(args, port, args.workers)
    weights = torch.full((args.mb * 1_000_000,), 7, dtype=torch.uint8)
    boxes = [torch.empty_like(weights) for _ in range(args.workers)]

    def serve(rank: int) -> None:
        for _ in range(args.rounds + 2):
            dist.recv(boxes[rank], rank)
            dist.send(weights, rank)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(args.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((box == rank + 1).all() for rank, box in enumerate(boxes))
    dist.barrier()
    dist.destroy_process_group()


def gloo_worker(args: Any, port: int, way: str, rank: int, ready: Any, queue: Any) -> None:
    import torch

    dist = gloo_group(args, port, rank)
    gradient = torch.full((args.mb * 1_000_000,), rank + 1, dtype=torch.uint8)
    landing = torch.zeros_like(gradient)

    def once() -> None:
        dist.send(gradient, args.workers)
        dist.recv(landing, args.workers)

    measured(rank, args.rounds, ready, queue, once)
    assert (landing == 7).all()
    dist.barrier()
    dist.destroy_process_group()


# -- torch RPC -------------------------------------------------------------------------------------

_held: dict[str, Any] = {}


def rpc_pull() -> Any:
    return _held["weights"]


def rpc_push(rank: int, gradient: Any) -> None:
    _held[f"box{rank}"].copy_(gradient)


def rpc_join(args: Any, port: int, name: str, rank: int) -> Any:
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TP_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=args.workers + 1, rpc_backend_options=options)
    return rpc


def rpc_server(args: Any, port: int, way: str) -> None:
    import torch

    size = args.mb * 1_000_000
    _held["weights"] = torch.full((size,), 7, dtype=torch.uint8)
    for rank in range(args.workers):
        _held[f"box{rank}"] = torch.empty(size, dtype=torch.uint8)
    rpc_join(args, port, "server", 0).shutdown()
    assert all((_held[f"box{rank}"] == rank + 1).all() for rank in range(args.workers))


def rpc_worker(args: Any, port: int, way: str, rank: int, ready: Any, queue: Any) -> None:
    import torch

    gradient = torch.full((args.mb * 1_000_000,), rank + 1, dtype=torch.uint8)
    landing = torch.zeros_like(gradient)
    rpc = rpc_join(args, port, f"worker{rank}", rank + 1)

    def once() -> None:
        rpc.rpc_sync("server", rpc_push, args=(rank, gradient))
        landing.copy_(rpc.rpc_sync("server", rpc_pull))

    measured(rank, args.rounds, ready, queue, once)
    assert (landing == 7).all()
    rpc.shutdown()


# -- the comparison --------------------------------------------------------------------------------

RIVALS: dict[str, tuple[Any, Any, str]] = {
    "ours, shared memory": (links_server, links_worker, "shared_memory"),
    "ours, Unix socket": (links_server, links_worker, "unix"),
    "ours, TCP": (links_server, links_worker, "tcp"),
    "gloo send/recv": (gloo_server, gloo_worker, ""),
    "torch RPC": (rpc_server, rpc_worker, ""),
}


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def once(args: Any, server: Any, worker: Any, way: str) -> float:
    """Return GB/s over all workers, both ways, from the first start to the last end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.rpc", "numpy"])
    port, ready, queue = free_port(), context.Barrier(args.workers), context.Queue()
    store = None if server is rpc_server else store_of(port, host=True)
    processes = [context.Process(target=server, args=(args, port, way))]
    processes += [
        context.Process(target=worker, args=(args, port, way, rank, ready, queue))
        for rank in range(args.workers)
    ]
    for process in processes:
        process.start()
    told = [queue.get(timeout=120) for _ in range(args.workers)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    del store
    seconds = max(end for _, _, end in told) - min(began for _, began, _ in told)
    return 2 * args.workers * args.rounds * args.mb / 1e3 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rates: dict[str, list[float]] = {name: [] for name in RIVALS}
    for _ in range(args.turns):
        for name, rival in RIVALS.items():
            rates[name].append(once(args, *rival))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(f"pull + push of {args.mb} MB, {args.workers} workers, one host, {args.turns} turns")
    print(f"{'':22}{'GB/s':>7}{'least':>8}{'most':>8}{'x RPC':>8}{'x gloo':>8}")
    for name, rate in middle.items():
        print(
            f"{name:22}{rate:7.2f}{min(rates[name]):8.2f}{max(rates[name]):8.2f}"
            f"{rate / middle['torch RPC']:8.2f}{rate / middle['gloo send/recv']:8.2f}"
        )
    goals = {
        "shared memory at least 4 x torch RPC": middle["ours, shared memory"]
        / middle["torch RPC"] / 4,
        "shared memory at least 2 x gloo": middle["ours, shared memory"]
        / middle["gloo send/recv"] / 2,
        "TCP at least gloo": middle["ours, TCP"] / middle["gloo send/recv"],
    }  # fmt: skip
    for goal, reached in goals.items():
        print(f"{'reached' if reached >= 1 else 'MISSED '}  {goal}")
    shared, tcp = middle["ours, shared memory"], middle["ours, TCP"]
    result = {
        "what": f"pull + push of {args.mb} MB, {args.workers} workers",
        "shared_memory_gb_per_s": shared,
        "unix_gb_per_s": middle["ours, Unix socket"],
        "tcp_gb_per_s": tcp,
        "gloo_gb_per_s": middle["gloo send/recv"],
        "rpc_gb_per_s": middle["torch RPC"],
        "ratio_rpc": shared / middle["torch RPC"],
        "ratio_gloo": shared / middle["gloo send/recv"],
        "tcp_ratio_gloo": tcp / middle["gloo send/recv"],
    }
    print(json.dumps({**result, "rates": rates}))


if __name__ == "__main__":
    main()
