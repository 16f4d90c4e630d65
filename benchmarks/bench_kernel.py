"""CPU that telemetry takes in the notebook's kernel: sockets, signatures, history and dashboard.

Another process plays the workers: it sends signed batches over real sockets, as engines do. This
process does what the kernel does: receives, joins, and draws 5 frames a second into a widget.

    python benchmarks/bench_kernel.py [--seconds 15]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from typing import Any

import numpy as np
import zmq

from workbench.cluster.router import ControlRouter
from workbench.history.store import RunHistory
from workbench.shared.messages import Hello, Records, Up
from workbench.shared.protocol import Seal, encode, records_from
from workbench.shared.record import RECORD
from workbench.views.live.frames import Dashboard

FRAME_S = 0.2
SILENT_S = 10.0
"""How long the first record may take, and all players together after their end."""


def play(url: str, key: bytes, workers: int, rate: int, seconds: float, sent: Any) -> None:
    """Send every worker's records in batches, at the intervals that engines use."""
    context = zmq.Context()
    sockets = []
    seals = [Seal(key) for _ in range(workers)]
    for rank in range(workers):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"engine-{rank}".encode())
        socket.connect(url)
        socket.send_multipart(seals[rank].pack(encode(Hello(engine=rank))))
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
            message = encode(Records(run=1, dropped=0, rows=rows.tobytes()))
            socket.send_multipart(seals[rank].pack(message))
        step += per_batch
        sent.value = step * workers
        time.sleep(max(0.0, began + step / rate - time.perf_counter()))
    for socket in sockets:
        socket.close(linger=2000)
    context.term()


def measure(workers: int, rate: int, seconds: float) -> dict[str, float]:
    """Return the kernel's CPU share, CPU per frame, and records lost.

    Raises:
        RuntimeError: The router accepted no record, so it would not accept those of workers.
    """
    history = RunHistory(range(workers))

    def take(engine: int, message: Up) -> None:
        if isinstance(message, Records):
            history.append(records_from(message.rows))

    router = ControlRouter(take)
    dashboard = Dashboard("bench", lambda name, fields: None)
    spawn = multiprocessing.get_context("spawn")
    sent = spawn.Value("q", 0)
    player = spawn.Process(target=play, args=(router.url, router.key, workers, rate, seconds, sent))
    player.start()
    end = time.monotonic() + SILENT_S
    while not len(history):
        time.sleep(0.01)
        if time.monotonic() > end:
            player.kill()
            router.close()
            raise RuntimeError(f"no record came in {SILENT_S:g} s, {router.rejected} were refused")
    cpu, began, frame_s, frames = time.process_time(), time.perf_counter(), 0.0, 0
    while player.is_alive():
        time.sleep(FRAME_S)
        snapshot = history.snapshot(name="bench", strategy="mirrored")
        middle = time.thread_time()
        dashboard.update(snapshot)
        frame_s += time.thread_time() - middle
        frames += 1
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    end = time.monotonic() + SILENT_S
    while int(history.totals.rows.sum()) < sent.value and time.monotonic() < end:
        time.sleep(0.05)
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0, help="how long workers send")
    given = parser.parse_args()
    for workers, rate in ((4, 100), (64, 100)):
        result = measure(workers, rate, given.seconds)
        print(
            f"{workers} workers x {rate} records/s: {result['cpu_share']:.1%} of a core, "
            f"{result['frame_ms']:.2f} ms a frame, {result['lost']:.0f} records lost"
        )
        print(json.dumps({"what": f"kernel CPU at {workers} x {rate}/s", **result}))


if __name__ == "__main__":
    main()
