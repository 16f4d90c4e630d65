"""What a history costs the kernel: CPU per record, time of a snapshot, memory of a long run.

Usage: python benchmarks/bench_history.py [--quick]

Prints one line per measurement and, at the end, all of them as JSON. Recorded loads are replayed at
full speed, and their CPU time is divided by the seconds of the original load. So the shares are
also right on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc

import numpy as np

from workbench.history.store import RunHistory
from workbench.shared.messages import Records
from workbench.shared.protocol import decode_up, encode, new_key, pack, records_from, unpack
from workbench.shared.record import RECORD


def rows(rank: int, first: int, steps: int, step_s: float = 0.01) -> np.ndarray:
    """Return `steps` plausible rows of one rank."""
    made = np.zeros(steps, RECORD)
    step = np.arange(first, first + steps)
    made["step"], made["rank"], made["samples"] = step, rank, 32
    made["start_s"], made["end_s"] = step * step_s, (step + 1) * step_s
    made["ready_s"] = made["start_s"] + step_s * (0.5 + 0.1 * ((rank + step) % 3))
    made["data_wait_s"], made["compute_s"] = 0.1 * step_s, 0.4 * step_s
    made["exposed_s"], made["wait_s"] = 0.4 * step_s, np.nan
    made["local_loss"] = 2.0 / (1 + step / 100)
    made["sent_bytes"], made["staleness"], made["bubble_s"] = 1e5, np.nan, np.nan
    return made


def streaming(workers: int, steps_per_s: int, seconds: int, batches_per_s: int = 10) -> float:
    """Return the share of one core that a live run takes: decode, append, 5 snapshots a second."""
    key, history = new_key(), RunHistory(range(workers))
    each = max(steps_per_s // batches_per_s, 1)
    messages = []
    for tick in range(seconds * batches_per_s):
        for rank in range(workers):
            payload = rows(rank, tick * each, each, 1 / steps_per_s).tobytes()
            message = Records(run=1, dropped=0, rows=payload)
            messages.append((tick, pack(encode(message), key)))
    began, seen = time.process_time(), 0
    for tick, frames in messages:
        if tick % 2 == 0 and tick != seen:
            seen = tick
            history.snapshot()
        message = decode_up(unpack(frames, key))
        if isinstance(message, Records):
            history.append(records_from(message.rows))
    history.snapshot()
    spent = time.process_time() - began
    if history.totals.steps != seconds * batches_per_s * each:
        raise SystemExit(f"rows were lost: {history.totals.steps} steps")
    return spent / seconds


def snapshot_ms(workers: int, steps: int) -> float:
    """Return the median time of one snapshot after `steps` steps, milliseconds."""
    history = RunHistory(range(workers))
    for first in range(0, steps, 100):
        for rank in range(workers):
            history.append(rows(rank, first, 100))
    history.snapshot()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        history.snapshot()
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e3


def long_run(workers: int, steps: int) -> dict[str, float]:
    """Return peak memory and speed of a long run."""
    tracemalloc.start()
    history = RunHistory(range(workers))
    began = time.process_time()
    for first in range(0, steps, 500):
        for rank in range(workers):
            history.append(rows(rank, first, 500))
    spent = time.process_time() - began
    history.snapshot()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "long_run_peak_mb": peak / 1e6,
        "long_run_rows_per_cpu_s": steps * workers / spent,
        "long_run_stride": float(history.stride),
        "long_run_steps": float(history.totals.steps),
    }


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    tenth = parser.parse_args().quick
    result: dict[str, object] = {
        "what": "what a history costs the kernel",
        "core_share_64_workers_100_steps_per_s": streaming(64, 100, 2 if tenth else 10),
        "core_share_2_workers_1000_steps_per_s": streaming(2, 1000, 2 if tenth else 10),
        "snapshot_ms_4_workers_10k_steps": snapshot_ms(4, 1_000 if tenth else 10_000),
        "snapshot_ms_64_workers_10k_steps": snapshot_ms(64, 1_000 if tenth else 10_000),
        **long_run(8, 100_000 if tenth else 1_000_000),
    }
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
