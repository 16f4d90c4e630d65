"""CPU that telemetry takes in the notebook's kernel: sockets, signatures, history and dashboard.

Another process plays the workers: it sends signed batches over real sockets, as engines do. This
process does what the kernel does: receives, joins, and draws 5 frames a second into a widget.

    python benchmarks/bench_kernel.py
"""

from __future__ import annotations

import json
import multiprocessing
import time
from typing import Any

import numpy as np
import zmq

from workbench.cluster.router import ControlRouter
from workbench.history.store import RunHistory
from workbench.protocol import RECORD, Message, pack, records_from
from workbench.views.dashboard import Dashboard

SECONDS = 15
FRAME_S = 0.2


def play(url: str, key: bytes, workers: int, rate: int, seconds: float, sent: Any) -> None:
    """Send every worker's records in batches, at the intervals that engines use."""
    context = zmq.Context()
    sockets = []
    for rank in range(workers):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"engine-{rank}".encode())
        socket.connect(url)
        socket.send_multipart(pack(Message("hello", {"engine": rank}), key))
        sockets.append(socket)
    interval = min(0.5, max(0.1, workers / 250))
    per_batch = max(1, round(rate * interval))
    noise = np.random.default_rng(0)
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for rank, socket in enumerate(sockets):
            rows = np.zeros(per_batch, RECORD)
            at = began + (step + np.arange(per_batch)) / rate
            rows["run"], rows["step"], rows["rank"], rows["samples"] = (
                1,
                step + np.arange(per_batch),
                rank,
                32,
            )
            rows["start_s"], rows["end_s"] = at, at + 1 / rate
            rows["ready_s"] = at + 0.6 / rate + noise.random(per_batch) * 0.2 / rate
            rows["compute_s"], rows["exposed_s"], rows["local_loss"] = 0.6 / rate, 0.4 / rate, 1.0
            for name in ("wait_s", "staleness", "bubble_s"):
                rows[name] = np.nan
            socket.send_multipart(
                pack(Message("records", {"run": 1, "dropped": 0}, (rows.tobytes(),)), key)
            )
        step += per_batch
        sent.value = step * workers
        time.sleep(max(0.0, began + step / rate - time.perf_counter()))
    for socket in sockets:
        socket.close(linger=2000)
    context.term()


def measure(workers: int, rate: int) -> dict[str, float]:
    """Return the kernel's CPU share, CPU per frame, and records lost."""
    history = RunHistory(range(workers))

    def take(engine: int, message: Message) -> None:
        if message.kind == "records":
            history.append(records_from(message.payload[0]))

    router = ControlRouter(take)
    dashboard = Dashboard("bench", lambda name, fields: None)
    spawn = multiprocessing.get_context("spawn")
    sent = spawn.Value("q", 0)
    player = spawn.Process(target=play, args=(router.url, router.key, workers, rate, SECONDS, sent))
    player.start()
    while not len(history):
        time.sleep(0.01)
    cpu, began, frame_s, frames = time.process_time(), time.perf_counter(), 0.0, 0
    while player.is_alive():
        time.sleep(FRAME_S)
        snapshot = history.snapshot(name="bench", strategy="mirrored")
        middle = time.thread_time()
        dashboard.update(snapshot)
        frame_s += time.thread_time() - middle
        frames += 1
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    time.sleep(0.5)
    history.finish()
    router.close()
    return {
        "workers": workers,
        "records_per_s": workers * rate,
        "cpu_share": share,
        "frame_ms": 1e3 * frame_s / frames,
        "lost": sent.value - int(history.totals.rows.sum()),
    }


def main() -> None:
    for workers, rate in ((4, 100), (64, 100)):
        result = measure(workers, rate)
        print(
            f"{workers} workers x {rate} records/s: {result['cpu_share']:.1%} of a core, "
            f"{result['frame_ms']:.2f} ms a frame, {result['lost']:.0f} records lost"
        )
        print(json.dumps({"what": f"kernel CPU at {workers} x {rate}/s", **result}))


if __name__ == "__main__":
    main()
