"""Round trip of an empty cell: `%%distributed` on our engines against ipyparallel's `%%px`.

Both magics run alternately in one IPython shell, each on the 4 engines of a separate cluster.

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

    from workbench.notebook.session import session

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench")
    with contextlib.redirect_stdout(io.StringIO()):
        shell.run_line_magic("cluster", f"start {given.engines} --devices cpu")
    assert session.cluster is not None
    # What the warm parent imports meanwhile takes a core from both sides.
    session.cluster.engine_set._ground.warm.warmed.wait(60)
    rival = ipp.Cluster(n=given.engines, log_level=50)
    client = rival.start_and_connect_sync()
    view = client[:]
    view.block = True
    view.activate()
    seconds: dict[str, list[float]] = {"distributed": [], "px": []}
    try:
        for number in range(given.cells + 5):
            for magic in ("distributed", "px") if number % 2 else ("px", "distributed"):
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
    pairs = zip(seconds["distributed"], seconds["px"], strict=True)
    ratios = sorted(ours_s / rival_s for ours_s, rival_s in pairs)
    print(
        f"%%distributed {ours * 1e3:.1f} ms, %%px {theirs * 1e3:.1f} ms, ratio {ours / theirs:.2f}"
    )
    result = {
        "what": "empty cell, round trip",
        "ours_s": ours,
        "rival_s": theirs,
        "ratio": ours / theirs,
        "pair_ratio": statistics.median(ratios),
        "pair_ratio_p5": ratios[round(0.05 * (len(ratios) - 1))],
        "pair_ratio_p95": ratios[round(0.95 * (len(ratios) - 1))],
        "cells": given.cells,
        "seconds": seconds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
