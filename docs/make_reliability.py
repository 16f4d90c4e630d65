"""Writes the tables of docs/reliability.md, and a class's in docs/shared-machines.md, as measured.

python benchmarks/bench_faults.py --json docs/measured/faults.json
python benchmarks/rivals.py --json docs/measured/rivals.json
python benchmarks/soak.py --json docs/measured/soak.json
python benchmarks/soak.py --faults interrupt raise --json docs/measured/soak-no-kills.json
python benchmarks/chaos.py --rounds 50 --seed 1 --json docs/measured/chaos.json  # and 2, 3, 4
python benchmarks/soak.py --restarts 150 --json docs/measured/restarts.json
python benchmarks/bench_class.py --seconds 20 --json docs/measured/class.json
python benchmarks/bench_class.py --seconds 20 --without-turns --json docs/measured/class.json
python docs/make_reliability.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, SHARED = HERE / "reliability.md", HERE / "shared-machines.md"
COMPARED = HERE / "alternatives.md"
STUDENTS, SERVER_CORES = 60, 16
"""What a class's figures are extrapolated to."""
MEASURED = HERE / "measured"
BEGIN, END = "<!-- {}: written by make_reliability.py -->", "<!-- end of {} -->"

RIVALS = {
    "starts": "started",
    "answers": "a cell",
    "raises": "a rank raises",
    "killed": "a worker is killed",
    "interrupted": "stop button",
    "orphans": "left over",
    "listens": "open sockets",
}

GROWTH = {
    "kernel_mb": "memory of the kernel, MB",
    "engines_mb": "memory of the engines and their helpers together, MB",
    "files": "open files of the kernel",
    "threads": "threads of the kernel",
    "processes": "processes",
    "engine_files": "open files of the engines and their helpers",
    "shared_memory": "shared memory files",
    "temporary": "temporary folders",
}

FAULTS = {
    "one rank raises, the others wait in all_reduce": (
        "one rank raises an error while the other ranks wait in `all_reduce`"
    ),
    "one rank raises, the others sleep": "one rank raises an error while the other ranks sleep",
    "one rank raises in its data, mirrored": (
        "one rank raises an error when it loads data, `mirrored`"
    ),
    "Stop at a step boundary, mirrored": "the run is stopped at the end of a step, `mirrored`",
    "interrupt of a cell whose ranks wait in all_reduce for one that sleeps": (
        "a cell is interrupted while ranks wait in `all_reduce` for a rank that sleeps"
    ),
    "one rank raises under TensorFlow's multi-worker mirrored": (
        "one rank raises an error under TensorFlow's `multi_worker_mirrored`"
    ),
    "a worker is SIGKILLed: named": (
        "a worker receives SIGKILL (measured: the time until a message names the worker)"
    ),
    "a server is SIGKILLed: named": (
        "a server receives SIGKILL (measured: the time until a message names the server)"
    ),
    "a worker is SIGKILLed: replaced, first step after it": (
        "a worker receives SIGKILL and is replaced (measured: the time until the next step)"
    ),
    "a worker is SIGKILLed: the others go on, first step after it": (
        "a worker receives SIGKILL and the other workers continue (measured: the time until "
        "the next step)"
    ),
    "Stop while a rank's data hangs and the others wait in all_reduce": (
        "the run is stopped while the data loading of one rank hangs and the other ranks wait in "
        "`all_reduce`"
    ),
    "Stop while a rank is in an endless loop and the others wait": (
        "the run is stopped while one rank is in an endless loop and the other ranks wait"
    ),
    "interrupt of an endless loop in a cell": "a cell with an endless loop is interrupted",
    "interrupt of time.sleep(1000) in a cell": "a cell in `time.sleep(1000)` is interrupted",
    "a host's cable is pulled": "a host's network connection is cut",
    "an agent is SIGKILLed": "Workbench's agent on a host receives SIGKILL",
    "all processes of a host are SIGKILLed": "all processes of a host receive SIGKILL",
    "the notebook's kernel is SIGKILLed": "the notebook's kernel receives SIGKILL",
}
"""Words of the page for faults whose measured names are shorter."""

CHAOS = {
    "one engine is killed, or all engines": ("kill engine", "kill engines"),
    "the controller or one of its child processes is killed": ("kill controller", "kill part"),
    "the warm parent is killed": ("kill warm parent",),
    "the keeper is killed": ("kill keeper",),
    "an engine, a controller process or the warm parent is killed before the cell begins": (
        "kill engine when idle", "kill part when idle", "kill controller when idle",
        "kill warm parent when idle",
    ),
    "an engine is suspended": ("halt engine",),
    "another process is suspended": (
        "halt controller", "halt part", "halt warm parent", "halt keeper",
    ),
    "the cell is interrupted once or twice": ("interrupt", "interrupt twice"),
    "the cell is stopped or paused, or its engines are restarted": (
        "stop", "pause, resume, stop", "pause, interrupt", "restart",
    ),
    "a rank raises an error": ("raise",),
    "the disk with the runs is full, before or during the training": (
        "disk fills", "disk full before",
    ),
    "the disk with the checkpoints is full": (
        "checkpoint disk fills", "checkpoint disk full before",
    ),
}  # fmt: skip

HELD = {
    "threads": "threads",
    "files": "open files",
    "sockets": "sockets among the open files",
    "pipes": "pipes",
    "events": "event counters and polls (eventfd, epoll)",
    "paths": "open files and devices with a name in the file system (no sockets, no pipes)",
    "rss_mb": "memory (RSS), MB",
    "pss_mb": "memory (PSS), MB",
    "processes": "processes that the kernel started",
}


def seconds(value: float | None) -> str:
    """Return a time in words that fit a table."""
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def faults(rows: list[dict[str, Any]]) -> str:
    """Return the table of what was promised and measured."""
    lines = [
        "| fault | command or option | promised time | median | worst | repeats |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        command = f"`{row['command']}`" if row["command"] else ""
        failed = f", {len(row['failed'])} failed" if row["failed"] else ""
        lines.append(
            f"| {FAULTS.get(row['fault'], row['fault'])} | {command} | {row['promise_s']:g} s "
            f"| {seconds(row['median_s'])} | {seconds(row['worst_s'])} | {row['repeats']}{failed} |"
        )
    return "\n".join(lines)


def rivals(rows: list[dict[str, Any]]) -> str:
    """Return the table of the same cells and faults in other tools, a row for each tool."""
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    lines = ["| tool | " + " | ".join(RIVALS.values()) + " |", "|---" * (len(RIVALS) + 1) + "|"]
    found = {(row["tool"], row["fault"]): row for row in rows}
    for tool in tools:
        started = found.get((tool, "starts"), {"median": None})["median"] is not None
        cells = [cell(fault, found.get((tool, fault))) for fault in RIVALS]
        lines.append(f"| {tool} | " + " | ".join(cells if started else ["—"] * len(cells)) + " |")
    return "\n".join(lines)


def cell(fault: str, row: dict[str, Any] | None) -> str:
    """Return what one tool did."""
    if row is None:
        return "not run"
    if fault in ("orphans", "listens"):
        return "—" if row["median"] is None else f"{row['median']:g}"
    says = "; ".join(row["says"]).replace("cell marked ", "")
    if row["median"] is None:
        return f"more than {row['limit_s']:g} s ({says})"
    return seconds(row["median"]) + ("" if fault in ("starts", "answers") else f" ({says})")


def soak(found: dict[str, Any], without_kills: dict[str, Any]) -> str:
    """Return the tables of many runs: what grew, and how the runs ended."""
    lines = [
        f"| growth per 100 runs, after the first {without_kills['behind']} runs | with kills "
        "| without kills | without kills, earlier half | without kills, later half |",
        "|---|---|---|---|---|",
    ]
    for name, words in GROWTH.items():
        parts = (found["slopes"], *(without_kills[part] for part in ("slopes", "earlier", "later")))
        lines.append(f"| {words} | " + " | ".join(growth(part[name]) for part in parts) + " |")
    lines += ["", "| number of | with kills | without kills |", "|---|---|---|"]
    lines.append(f"| all runs | {found['runs']} | {without_kills['runs']} |")
    for words in ("interrupt", "kill", "raise", "HUNG"):
        counts = (
            sum(times for end, times in one["ends"].items() if words in end)
            for one in (found, without_kills)
        )
        called = {
            "interrupt": "runs that were interrupted", "kill": "runs in which an engine was killed",
            "raise": "runs in which a rank raised an error",
        }  # fmt: skip
        lines.append(
            f"| {called.get(words, 'runs that hung')} | " + " | ".join(map(str, counts)) + " |"
        )
    return "\n".join(lines)


def chaos(seeds: list[dict[str, Any]]) -> str:
    """Return the table of what became of rounds of random faults."""
    lines = [
        "| fault | rounds | time until the cell ends: median | worst | rounds in which the next "
        "cell works immediately | rounds in which the next cell works after the suggested "
        "action | time from the end of the cell to the end of the next cell: median | worst "
        "| rounds in which a check failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rounds = [one for seed in seeds for one in seed["each"]]
    for words, names in (*CHAOS.items(), ("all rounds", None)):
        found = [one for one in rounds if names is None or one["fault"] in names]
        if not found:
            continue
        stepped = sum(bool(one["steps"]) for one in found)
        wrong = sum(bool(one["wrong"]) for one in found)
        times = [
            seconds(of(one[name] for one in found))
            for name in ("ended_s", "after_s")
            for of in (statistics.median, max)
        ]
        lines.append(
            f"| {words} | {len(found)} | {times[0]} | {times[1]} | {len(found) - stepped} "
            f"| {stepped} | {times[2]} | {times[3]} | {wrong} |"
        )
    return "\n".join(lines)


def restarts(found: dict[str, Any]) -> str:
    """Return the table of what a kernel held after restarts."""
    behind, count = found["behind"], found["restarts"]
    lines = [
        f"| number or size, in the kernel | after {behind + 1} restarts | after {count} restarts "
        "| growth per 100 restarts | growth per 100 restarts, later half |",
        "|---|---|---|---|---|",
    ]
    for name, words in HELD.items():
        then, now = (found[f"{name}_{when}"] for when in ("then", "now"))
        slopes = " | ".join(growth(found[part][name]) for part in ("slopes", "later"))
        lines.append(f"| {words} | {then:.0f} | {now:.0f} | {slopes} |")
    return "\n".join(lines)


def growth(value: float | None) -> str:
    """Return a slope; what rounds to nothing is 0."""
    if value is None:
        return "–"
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0"


def a_class(found: dict[str, Any]) -> str:
    """Return the table of a class of notebooks, and what follows from it for a larger one."""
    ways = [found["with_turns"], found["without_turns"]]
    rows = {
        "time until a notebook is ready: first notebook, median, last notebook": lambda one: (
            " / ".join(f"{one[f'{which}_ready_s']:.1f} s" for which in ("first", "median", "last"))
        ),
        "memory (PSS) of all notebooks when they are ready": lambda one: (
            f"{one['idle_pss_mb'] / 1e3:.1f} GB"
        ),
        "memory (PSS) of all notebooks while they train": lambda one: (
            f"{one['training_pss_mb'] / 1e3:.1f} GB"
        ),
        "steps/s of a notebook: slowest, median, fastest": lambda one: " / ".join(
            f"{one[f'{which}_steps_per_s']:.1f}" for which in ("least", "median", "most")
        ),
        "steps/s of all notebooks together": lambda one: f"{one['all_steps_per_s']:.0f}",
        "Jain's index of fairness (1: all notebooks are equally fast)": lambda one: (
            f"{one['jain']:.3f}"
        ),
        "cores that other programs used at the same time": lambda one: f"{one['others_cores']:.1f}",
    }
    one = ways[0]
    each_gb = one["training_pss_mb"] / 1e3 / one["notebooks"]
    last_s = STUDENTS / one["notebooks"] * one["last_ready_s"]
    server_s = last_s * one["cores"] / SERVER_CORES
    size_gb = server_gb(STUDENTS * each_gb)
    lines = [
        "| measured value | with turns | without turns |",
        "|---|---|---|",
        *(f"| {words} | " + " | ".join(map(say, ways)) + " |" for words, say in rows.items()),
        "",
        f"{one['notebooks']} notebooks with {one['engines']} engines each ran on {one['cores']} "
        "cores, and each value was measured once. The following values are extrapolated, not "
        f"measured: {STUDENTS} such notebooks need {STUDENTS} × {each_gb:.2f} GB = "
        f"{STUDENTS * each_gb:.0f} GB while they train. The last notebook is ready after "
        f"{STUDENTS} / {one['notebooks']} × "
        f"{one['last_ready_s']:.0f} s = {last_s:.0f} s on {one['cores']} cores. Suppose that "
        "twice as many cores need half the time. Then the last notebook is ready after "
        f"{last_s:.0f} s × {one['cores']} / {SERVER_CORES}, about {server_s:.0f} s, on "
        f"{SERVER_CORES} cores. At least a quarter of the memory should stay free, so the machine "
        f"needs at least {STUDENTS * each_gb:.0f} GB / 0.75 = {STUDENTS * each_gb / 0.75:.0f} GB. "
        f"The next usual memory size is {size_gb} GB. So for {STUDENTS} notebooks, use a machine "
        f"with {SERVER_CORES} cores and {size_gb} GB.",
    ]
    return "\n".join(lines)


def server_gb(needed_gb: float) -> int:
    """Return the usual size of memory that leaves a quarter free for the system and for data."""
    return next(size for size in (16, 32, 64, 128, 256, 512, 1024) if size >= needed_gb / 0.75)


def put(page: str, name: str, table: str) -> str:
    """Return the page with a table put between its marks."""
    begin, end = BEGIN.format(name), END.format(name)
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has no place for the table {name!r}: {begin} ... {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def written() -> str:
    """Return the page as it should be."""
    return filled(PAGE.read_text())


def filled(page: str) -> str:
    """Return a page with its tables as they were measured."""
    page = put(page, "faults", faults(measured("faults")["rows"]))
    page = put(page, "hosts", faults(measured("hosts")["rows"]))
    page = put(page, "chaos", chaos(measured("chaos")["seeds"]))
    page = put(page, "restarts", restarts(measured("restarts")))
    return put(page, "soak", soak(measured("soak"), measured("soak-no-kills")))


def compared() -> str:
    """Return the page on other tools with its table as it was measured."""
    return put(COMPARED.read_text(), "rivals", rivals(measured("rivals")))


def shared() -> str:
    """Return the page on shared machines with its table as it was measured."""
    return put(SHARED.read_text(), "class", a_class(measured("class")))


def measured(name: str) -> Any:
    """Return what a benchmark wrote."""
    return json.loads((MEASURED / f"{name}.json").read_text())


if __name__ == "__main__":
    PAGE.write_text(written())
    SHARED.write_text(shared())
    COMPARED.write_text(compared())
