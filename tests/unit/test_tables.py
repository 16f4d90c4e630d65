from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from history_rows import NAN, make_history, make_rows, make_summary

from workbench import catalog
from workbench.history.analysis.comparison import compare
from workbench.history.analysis.summary import summarise
from workbench.history.store import RunHistory
from workbench.shared.events import Healed, Joined
from workbench.views.table import Column, Table
from workbench.views.tables import (
    cluster_table,
    comparison_table,
    loss,
    strategies_table,
    summary_table,
)
from workbench.views.text import size


def bundle(table: Table) -> tuple[str, str]:
    made = table._repr_mimebundle_()
    assert set(made) == {"text/html", "text/plain"}
    return made["text/html"], made["text/plain"]


def words(markup: str) -> str:
    """The visible text of HTML, runs of blanks as one."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def comparison_of_two():
    return compare([
        make_summary("one_device", compute_s=0.02, transfer_s=0.0),
        make_summary("mirrored", ranks=4, compute_s=0.005, meta_accuracy=0.9375),
    ])  # fmt: skip


EVERY = {
    "cluster": lambda: cluster_table([{"engine": 0, "state": "idle", "memory_bytes": 3 << 20}]),
    "summary": lambda: summary_table(make_summary("mirrored", ranks=2, meta_accuracy=0.5)),
    "comparison": lambda: comparison_table(comparison_of_two()),
    "strategies": strategies_table,
}


@pytest.mark.parametrize("kind", EVERY)
def test_html_and_text_say_the_same(kind: str) -> None:
    table = EVERY[kind]()
    markup, text = bundle(table)
    shown = [table.title, *table.notes, *(c.title for c in table.columns)]
    shown += [cell for row in table.rows for cell in row]
    plain = " ".join(text.split())
    for piece in shown:
        assert " ".join(piece.split()) in words(markup)
        for word in piece.split():
            assert word in plain


@pytest.mark.parametrize("kind", EVERY)
def test_html_brings_no_colour_of_its_own(kind: str) -> None:
    markup, _ = bundle(EVERY[kind]())
    assert "class=" not in markup
    assert "<style" not in markup
    colours = re.findall(r"(?<![-\w])(?:color|background)\s*:\s*([^;\"]+)", markup)
    assert set(colours) <= {"inherit", "transparent"}


@pytest.mark.parametrize("kind", EVERY)
def test_text_is_aligned(kind: str) -> None:
    table = EVERY[kind]()
    lines = bundle(table)[1].splitlines()
    rule = next(i for i, line in enumerate(lines) if set(line) == {"─", " "})
    ends = [match.end() for match in re.finditer("─+", lines[rule])]
    header = lines[rule - 1]
    for column, end in zip(table.columns, ends, strict=True):
        if column.align == "right":
            assert header[:end].endswith(column.title)


def test_names_from_outside_are_escaped() -> None:
    table = cluster_table([{"device": "<script>alert(1)</script>"}])
    assert "<script>" not in table.html()
    assert "<script>" in table.text()


def test_code_in_notes_is_drawn_as_code() -> None:
    table = Table([Column("a", "left")], [["1"]], notes=["call `f(<x>)` first"])
    assert "call <code>f(&lt;x&gt;)</code> first" in table.html()
    assert "`f(<x>)`" in table.text()


def test_engines_show_units_and_dashes() -> None:
    rows = [
        {"engine": 0, "rank": 0, "state": "idle", "memory_bytes": 512 << 20, "cpu_percent": 12.4,
         "heartbeat_s": 0.2, "busy": False, "uptime_s": 75},
        {"engine": 3, "rank": None, "state": "gone", "memory_bytes": None, "cpu_percent": None,
         "heartbeat_s": None, "busy": None, "uptime_s": None},
    ]  # fmt: skip
    lines = cluster_table(rows).text().splitlines()
    assert re.split(r"\s{2,}", lines[2].strip()) == [
        "0", "0", "idle", "512 MiB", "12 %", "200 ms ago", "no", "1:15",
    ]  # fmt: skip
    assert lines[3].count("–") == 6


def test_no_engine_gives_an_empty_table() -> None:
    assert cluster_table([], notes=["none here"]).text().endswith("none here")


def test_the_fastest_run_stands_out_and_the_verdict_is_on_top() -> None:
    compared = comparison_of_two()
    table = comparison_table(compared)
    assert table.strong == {1}
    assert table.title == compared.verdict
    assert "2.09x" in table.text()
    assert "52 %" in table.text()
    assert "0.9375" in table.text()


def test_without_one_device_the_column_says_what_it_is_relative_to() -> None:
    runs = [make_summary(name, ranks=2) for name in ("mirrored", "fsdp")]
    table = comparison_table(compare(runs))
    titles = [column.title for column in table.columns]
    assert "vs mirrored" in titles
    assert "efficiency" not in titles  # it would be a column of dashes
    runs.append(make_summary("one_device"))
    assert "efficiency" in [column.title for column in comparison_table(compare(runs)).columns]


def test_headings_take_two_lines_where_the_page_is_narrow_and_numbers_do_not() -> None:
    html = comparison_table(compare([make_summary("a"), make_summary("b")])).html()
    assert "nowrap" not in html.partition("</thead>")[0]
    assert "nowrap" in html.partition("</thead>")[2]


def test_what_no_run_has_measured_is_no_column() -> None:
    known = [make_summary(name) for name in ("a", "b")]
    rows = make_rows(20, 1)
    rows["sent_bytes"] = NAN
    base = {"framework": "torch", "recipe": "abc", "seed": 0, "batch_size": 32}
    unknown = [summarise(make_history(rows), {**base, "name": n, "strategy": n}) for n in "ab"]
    assert "sent/step" in [c.title for c in comparison_table(compare(known)).columns]
    left = {c.title for c in comparison_table(compare(unknown)).columns}
    assert not {"sent", "sent/step"} & left


def test_spreads_over_seeds_are_shown_and_explained() -> None:
    runs = [
        make_summary(f"m-seed{s}", ranks=2, meta_strategy="mirrored", meta_seed=s,
                     compute_s=0.01 + 0.001 * s)
        for s in range(2)
    ]  # fmt: skip
    text = comparison_table(compare(runs)).text()
    assert "±" in text
    assert "standard deviation" in text


def test_frameworks_are_a_column_when_they_differ() -> None:
    first, second = make_summary("a"), make_summary("b", meta_framework="tensorflow")
    titles = [c.title for c in comparison_table(compare([first, second])).columns]
    assert "framework" in titles
    titles = [c.title for c in comparison_table(compare([first])).columns]
    assert "framework" not in titles


def test_what_was_not_measured_is_a_dash_and_named_never_zero() -> None:
    rows = make_rows(5, 2)
    rows["exposed_s"], rows["ready_s"], rows["sent_bytes"] = NAN, NAN, NAN
    table = summary_table(summarise(make_history(rows), {"name": "async"}))
    titles = [column.title for column in table.columns]
    for title in ("sync wait", "transfer", "median wait", "potential"):
        assert {row[titles.index(title)] for row in table.rows} == {"–"}
    assert any("sync wait, transfer" in note for note in table.notes)
    assert any("sent bytes" in note for note in table.notes)


def test_hosts_stand_in_a_runs_table_where_workers_are_elsewhere() -> None:
    history = make_history(make_rows(5, 2))
    assert "host" not in [c.title for c in summary_table(summarise(history, {})).columns]
    history.hear("run_started", {"rank": 1, "t_s": 0.0, "device": "cpu", "host": "xh1"})
    table = summary_table(summarise(history, {}))
    at = [column.title for column in table.columns].index("host")
    assert [row[at] for row in table.rows] == ["–", "xh1"]


def test_what_workers_and_servers_hold_is_shown() -> None:
    history = make_history(make_rows(5, 2))
    assert "memory" not in summary_table(summarise(history, {})).text()
    history.hear("log", {"step": 1, "rank": 1, "values": {"memory_bytes": 3 << 20}})
    parts = {"parameters_bytes": 1 << 20, "optimizer_bytes": 2 << 20, "gradients_bytes": 512 << 10}
    history.hear("server", {"rank": 0, "server": 0, **parts})
    table = summary_table(summarise(history, {}))
    holds = [column.title for column in table.columns].index("memory")
    assert [(row[0], row[holds]) for row in table.rows] == [
        ("0", "–"), ("1", "3.0 MiB"), ("s0", "3.5 MiB"),
    ]  # fmt: skip
    sizes = ("Server s0", "1.0 MiB", "2.0 MiB", "512 KiB")
    assert any(all(told in note for told in sizes) for note in table.notes)


def test_a_pipelines_summary_tells_bubbles_and_stages() -> None:
    rows = make_rows(5, 2)
    rows["end_s"] = rows["start_s"] + 0.1
    rows["bubble_s"], rows["compute_s"] = [0.030, 0.015], [0.070, 0.085]
    history = make_history(rows)
    stage = {"layers": "0 to 3", "parameters": 1056, "microbatch_s": 0.0015, "handed_bytes": 2048}
    history.hear("split", {
        "rank": 0, "schedule": "gpipe", "microbatches": 8, "microbatch_samples": 4, "pipelines": 1,
        "ideal_bubble": 0.2, "stages": [{**stage, "stage": i, "rank": i} for i in range(2)],
    })  # fmt: skip
    table = summary_table(summarise(history, {}))
    at = [column.title for column in table.columns].index("bubble")
    assert [row[at : at + 2] for row in table.rows] == [["30 %", "+10 %"], ["15 %", "±0 %"]]
    told = ("Stage 1", "worker 1", "layers 0 to 3", "1,056", "1.5 ms", "2.0 KiB")
    assert all(value in table.notes[-1] for value in told)
    assert "bubble" not in [c.title for c in summary_table(make_summary("mirrored")).columns]


def test_a_summary_says_when_rows_were_thinned() -> None:
    run = replace(make_summary("mirrored"), stride=8, notes=("global batch 64 = 2 x 32",))
    notes = summary_table(run).notes
    assert any(re.search(r"\b8 steps\b", note) for note in notes)
    assert notes[-1] == "global batch 64 = 2 x 32"


def test_the_catalog_table_lists_every_entry_with_its_options() -> None:
    table = strategies_table()
    assert len(table.rows) == len(catalog.CATALOG)
    for entry, row in zip(catalog.CATALOG, table.rows, strict=True):
        assert entry.name in row[0]
        for option in entry.options:
            assert f"{option.name}=" in row[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (150 << 20, "150 MiB"),
     (1023 * 1024 + 900, "1.0 MiB"), (NAN, "–"), (None, "–"), (3 << 40, "3.0 TiB")],
)  # fmt: skip
def test_sizes_have_binary_units(value: float | None, shown: str) -> None:
    assert size(value) == shown


def test_a_diverged_loss_is_shown_and_an_unknown_one_is_a_dash() -> None:
    assert loss(float("inf")) == "inf"
    assert loss(NAN) == "–"
    assert loss(0.123456) == "0.1235"


def test_long_words_are_not_broken() -> None:
    table = Table([Column("a", "left", 8)], [["find_unused_parameters=false yes"]])
    assert "find_unused_parameters=false\nyes" in table.text()


@pytest.mark.parametrize(
    ("total", "said"), [(20, "20 steps,"), (30, "20 of 30 steps,"), (15, "20 steps,")]
)
def test_the_steps_asked_for_are_named_where_fewer_were_taken(total: int, said: str) -> None:
    run = replace(make_summary("parameter_server"), total_steps=total)
    assert summary_table(run).notes[0].startswith(said)


def test_steps_beyond_those_asked_for_are_the_busiest_workers() -> None:
    run = replace(make_summary("parameter_server"), total_steps=15, joined=False)
    assert re.match(r"20 steps \(.*most steps", summary_table(run).notes[0])


def test_a_summary_says_when_workers_went_and_came() -> None:
    history = make_history(make_rows(60, 3))
    assert not any(note.startswith("Workers:") for note in summary_of(history).notes)
    history.event(Healed(ranks=[1], step=20, seconds=0.1, workers=1))
    history.event(Joined(ranks=[1], step=40, seconds=0.1, workers=3))
    told = r"^Workers:.*step 20.*rank 1.*1 worker.*step 40.*rank 1.*3 workers"
    assert any(re.search(told, note) for note in summary_of(history).notes)


def summary_of(history: RunHistory) -> Table:
    return summary_table(summarise(history, {"strategy": "mirrored", "state": "finished"}))
