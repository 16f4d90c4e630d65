"""Round trip of an empty cell: `%%distributed` on our engines against ipyparallel's `%%px`.

Both magics run in one IPython shell, in turn, each on 4 engines of its own cluster.

    python benchmarks/bench_cells.py [--cells 60]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--engines", type=int, default=4)
    given = parser.parse_args()

    import ipyparallel as ipp
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench")
    with contextlib.redirect_stdout(io.StringIO()):
        shell.run_line_magic("cluster", f"start {given.engines}")
    rival = ipp.Cluster(n=given.engines, log_level=50)
    client = rival.start_and_connect_sync()
    view = client[:]
    view.block = True
    view.activate()
    seconds: dict[str, list[float]] = {"distributed": [], "px": []}
    try:
        for number in range(given.cells + 5):
            for magic in ("distributed", "px"):
                began = time.perf_counter()
                shell.run_cell_magic(magic, "", "pass")
                if number >= 5:
                    seconds[magic].append(time.perf_counter() - began)
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            shell.run_line_magic("cluster", "stop")
        client.close()
        rival.stop_cluster_sync()
    ours, theirs = (statistics.median(seconds[m]) for m in ("distributed", "px"))
    ratios = [a / b for a, b in zip(seconds["distributed"], seconds["px"], strict=True)]
    print(
        f"%%distributed {ours * 1e3:.1f} ms, %%px {theirs * 1e3:.1f} ms, ratio {ours / theirs:.2f}"
    )
    result = {
        "what": "empty cell, round trip",
        "ours_s": ours,
        "rival_s": theirs,
        "ratio": ours / theirs,
        "ratio_p5": statistics.quantiles(ratios, n=20)[0],
        "ratio_p95": statistics.quantiles(ratios, n=20)[-1],
        "cells": given.cells,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
