"""A class: notebooks on one machine that all load the extension and start their engines at once.

Each notebook is a separate process, as a kernel is. It starts the warm parent and its engines, and
trains. The script measures the seconds until each notebook is ready, and the memory of all
processes together before and during the training (PSS: shared pages are divided among their
processes). It also measures how evenly the notebooks train: the steps per second of each, and their
Jain index (1: all equal, 1/n: one notebook takes all). Other work on the machine disturbs this, so
its use of cores is measured too. With `--without-turns` the notebooks do not take turns to import
the framework.

    python benchmarks/bench_class.py [--notebooks 12] [--engines 3] [--seconds 10]

With `--json` the file keeps the figures of the other way too.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MB = 1e6
READY_S = 240
PATIENCE_S = 80
"""How long a notebook's first steps are waited for; one that has none by then counts as 0."""

CELL = """
import torch
from torch import nn
torch.manual_seed(0)
wb.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
       wb.data.digits("train"), loss=nn.CrossEntropyLoss(), batch_size=64,
       optimizer=lambda p: torch.optim.SGD(p, 0.05), steps=10**7)
"""


def one(engines):
    """Be one notebook; lines on stdin say when to continue."""
    from workbench.notebook import session

    began = time.perf_counter()
    session.session.prewarm()
    cluster = session.session.start(engines)
    cluster.execute("x = 1").over.wait(READY_S)
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    sys.stdin.readline()
    run = cluster.run(CELL, strategy="mirrored" if engines > 1 else "one_device")
    end = time.monotonic() + PATIENCE_S
    while run.history.totals.steps < 3 and not run.is_over and time.monotonic() < end:
        time.sleep(0.05)
    print(json.dumps({"trains": run.state}), flush=True)
    sys.stdin.readline()
    steps, at = run.history.totals.steps, time.perf_counter()
    sys.stdin.readline()
    rate = (run.history.totals.steps - steps) / (time.perf_counter() - at)
    print(json.dumps({"steps_per_s": rate}), flush=True)
    session.session.stop()


def said(process, name):
    """Return what a notebook says next under a name; other output is skipped."""
    for line in process.stdout:
        if line.startswith("{") and name in (found := json.loads(line)):
            return found[name]
    sys.exit(f"a notebook ended:\n{process.wait()}")


def go_on(processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def jain(rates):
    """Return Jain's index of fairness: the square of the mean over the mean of the squares."""
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 0.0


def family_of(processes):
    """Return all descendants of the notebooks, by pid."""
    family = {}
    for process in processes:
        root = psutil.Process(process.pid)
        for member in (root, *root.children(recursive=True)):
            family[member.pid] = member
    return family


def busy_s(processes):
    """Return the seconds of CPU that the machine has spent so far, and the class of them."""
    machine = psutil.cpu_times()
    ours = 0.0
    for member in family_of(processes).values():
        with contextlib.suppress(psutil.Error):  # it has ended
            times = member.cpu_times()
            ours += times.user + times.system
    return sum(machine) - machine.idle - machine.iowait, ours


def pss_bytes(processes):
    """Return the PSS of all that descends from the notebooks, and how many processes there are."""
    family = family_of(processes)
    total = 0
    for member in family.values():
        with contextlib.suppress(psutil.Error):  # it has ended
            total += member.memory_full_info().pss
    return total, len(family)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=int, default=12)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--without-turns", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.engines)
        return
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, __file__, "--one", "--engines", str(given.engines)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "WORKBENCH_HOME": home}
        used = psutil.virtual_memory().available
        books = []
        for number in range(given.notebooks):
            if given.without_turns:  # turns are taken in there
                env["XDG_RUNTIME_DIR"] = os.path.join(home, f"runtime-{number}")
                os.mkdir(env["XDG_RUNTIME_DIR"], mode=0o700)
            books.append(subprocess.Popen(command, env=env, **pipes))
        try:
            ready_s = sorted(said(book, "ready_s") for book in books)
            idle_bytes, processes = pss_bytes(books)
            print(f"ready after {ready_s}, {idle_bytes / MB:.0f} MB", file=sys.stderr, flush=True)
            go_on(books)
            for book in books:
                said(book, "trains")
            go_on(books)
            before, began = busy_s(books), time.monotonic()
            time.sleep(given.seconds)
            after, window_s = busy_s(books), time.monotonic() - began
            others = (after[0] - before[0] - after[1] + before[1]) / window_s
            busy_bytes, _ = pss_bytes(books)
            print(f"training, {busy_bytes / MB:.0f} MB", file=sys.stderr, flush=True)
            taken = used - psutil.virtual_memory().available
            go_on(books)
            rates = sorted(said(book, "steps_per_s") for book in books)
        finally:
            for book in books:
                book.kill()
                book.communicate()
    each = {"ready_s": [round(s, 2) for s in ready_s], "steps_per_s": [round(r, 2) for r in rates]}
    result = {
        "what": f"a class of {given.notebooks} notebooks x {given.engines} engines",
        "turns": not given.without_turns, "seconds": given.seconds,
        "notebooks": given.notebooks, "engines": given.engines, "cores": os.cpu_count(),
        "processes": processes, "idle_pss_mb": idle_bytes / MB, "training_pss_mb": busy_bytes / MB,
        "notebook_pss_mb": busy_bytes / MB / given.notebooks, "machine_mb": taken / MB,
        "first_ready_s": ready_s[0], "median_ready_s": statistics.median(ready_s),
        "last_ready_s": ready_s[-1], "all_steps_per_s": sum(rates),
        "others_cores": max(0.0, others), "least_steps_per_s": rates[0],
        "median_steps_per_s": statistics.median(rates), "most_steps_per_s": rates[-1],
        "jain": jain(rates),
        "least_over_most": rates[0] / rates[-1] if rates[-1] else 0.0,
    }  # fmt: skip
    print(f"{given.notebooks} notebooks: ready after {ready_s[0]:.1f} to {ready_s[-1]:.1f} s, ")
    print(f"{busy_bytes / MB:.0f} MB in all, slowest/fastest {result['least_over_most']:.2f}, ")
    print(f"Jain's index {result['jain']:.3f}")
    if given.json:
        known = json.loads(given.json.read_text()) if given.json.exists() else {}
        known["without_turns" if given.without_turns else "with_turns"] = {**result, **each}
        given.json.write_text(json.dumps(known, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
