"""CPU that one frame of the live dashboard costs the kernel: python benchmarks/bench_dashboard.py

Frames go through a real ipykernel session to a real socket; the work of the browser is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from ipykernel.kernelapp import IPKernelApp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_run import fake_snapshot

from workbench.views.live.figure import run_bundle
from workbench.views.live.frames import Dashboard
from workbench.views.live.svg import run_svg
from workbench.views.text import progress_line


def cpu_ms(action: Callable[[int], object], times: int) -> float:
    """Return the CPU milliseconds of this process per call."""
    began_s = time.process_time()
    for index in range(times):
        action(index)
    return (time.process_time() - began_s) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100)
    frames = parser.parse_args().frames
    app = IPKernelApp.instance()
    app.initialize([])
    reader = zmq.Context.instance().socket(zmq.SUB)
    reader.connect(f"tcp://127.0.0.1:{app.iopub_port}")
    reader.subscribe(b"")
    found = {}
    for workers in (2, 4, 8):
        story = [fake_snapshot(workers, 900 + 2 * i, total=4000) for i in range(frames)]
        widget = Dashboard("bench", lambda name, fields: None)
        widget._receive(widget, {"type": "hello"}, [])
        widget.update(story[0])
        found[f"delta_{workers}_workers_ms"] = cpu_ms(
            lambda i, w=widget, s=story: w.update(s[i]), frames
        )
        hello = {"type": "hello"}
        found[f"full_{workers}_workers_ms"] = cpu_ms(
            lambda i, w=widget, h=hello: w._receive(w, h, []), frames
        )
        widget.close()
    shot = fake_snapshot(4, 900, total=4000)
    found["svg_4_workers_ms"] = cpu_ms(lambda i: run_svg(shot), max(5, frames // 5))
    found["text_line_4_workers_ms"] = cpu_ms(lambda i: progress_line(shot), frames)
    run_bundle(shot)
    found["final_picture_4_workers_ms"] = cpu_ms(lambda i: run_bundle(shot), 3)
    reader.close()
    out = sys.__stdout__  # the kernel has taken stdout
    for name, cost_ms in found.items():
        print(f"{name:<30} {cost_ms:8.3f}", file=out)
    result = {"what": "CPU of a dashboard's frame in the kernel", "frames": frames}
    print(
        json.dumps({**result, **{key: round(value, 3) for key, value in found.items()}}), file=out
    )


if __name__ == "__main__":
    main()
