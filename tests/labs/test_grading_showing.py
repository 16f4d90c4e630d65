"""The table for people, the JSON for programs, and the exit status."""

from __future__ import annotations

import json
import re

import pytest

from workbench.labs.grading.results import (
    Graded,
    Outcome,
    from_wire,
    printable,
    status,
    text,
    to_json,
)


def wrong(words, hint="", right=False):
    return {"right": right, "words": words, "hint": hint}


def some():
    return [
        Graded("a/ann.ipynb", 1, [Outcome("1.1", state="right"), Outcome("1.10", state="right")]),
        Graded("b/bob.ipynb", 1, [
            Outcome("1.1", state="wrong", findings=[wrong("fine", right=True),
                                                    wrong("it is 4", "look at `rank`")]),
            Outcome("1.10", state="stopped", error="it took longer than 5 s\nand more"),
        ], notes=["1.1 is from the lab"]),
        Graded("c/cy.ipynb", problems=["No JSON: x."]),
    ]  # fmt: skip


def test_a_row_has_marks_points_and_the_first_reason_of_each_exercise():
    shown = text(some()).splitlines()
    assert shown[0].startswith("Lab 1: 1 of 2 ")
    assert shown[1].split()[:5] == ["notebook", "1.1", "1.10", "right", "s"]
    ann, bob, more = shown[3:6]
    cy = shown[10]
    assert ann.split() == ["ann.ipynb", "✓", "✓", "2/2", "0"]
    assert bob.split()[:5] == ["bob.ipynb", "✗", "!", "0/2", "0"]
    assert bob.endswith("1.1: it is 4 (hint: look at `rank`)")
    assert re.fullmatch(r"1\.10: .* 5 s", more.strip())
    assert shown[6:8] == ["", "Not graded"]
    assert cy.split()[:2] == ["cy.ipynb", "-"]
    assert cy.endswith("No JSON: x.")
    assert "bob.ipynb: 1.1 is from the lab" in shown


def test_each_lab_has_a_table_of_its_own():
    two = [Graded("b.ipynb", lab, [Outcome(f"{lab}.1", state="right")]) for lab in (2, 3)]
    titles = [line.split() for line in text(two).splitlines() if line.startswith("notebook")]
    assert [title[1] for title in titles] == ["2.1", "3.1"]


def test_what_a_terminal_would_obey_is_not_printed():
    bad = Graded("\x1b[2Jx.ipynb", 1, [Outcome("1.1", state="wrong", error="\x1b]0;evil\x07\r")])
    shown = text([bad])
    assert not set("\x1b\x07\r") & set(shown)
    assert printable("a\x9bb") == "a\N{REPLACEMENT CHARACTER}b"


def test_notebooks_of_the_same_name_are_told_apart_by_the_shortest_ends_of_their_paths():
    paths = ["x/ann/lab_1.ipynb", "x/bob/lab_1.ipynb", "y/bob/lab_1.ipynb", "x/cy.ipynb"]
    one = [Outcome("1.1", state="wrong", put_back=["print"])]
    shown = text([Graded(path, 1, one, ["moved"]) for path in paths])
    names = ["ann/lab_1.ipynb", "x/bob/lab_1.ipynb", "y/bob/lab_1.ipynb", "cy.ipynb"]
    assert [line.split()[0] for line in shown.splitlines()[3:7]] == names
    for name in names:
        assert f"\n{name}: moved" in shown
        assert re.search(rf"\n{re.escape(name)}: .*1\.1 redefined .* print\n", shown + "\n")
    assert len(text([Graded("a.ipynb", 1, one)] * 2).splitlines()) > 4


def test_a_name_makes_no_row_of_its_own():
    name = "bob.ipynb\nann.ipynb  ✓    1/1\u2028\x85.ipynb"
    bad = Graded(f"x/{name}", 1, [Outcome("1.1", state="wrong")], ["moved"])
    shown = text([bad])
    assert not any(line.startswith("ann.ipynb") for line in shown.splitlines())
    assert len(shown.splitlines()) == 6


def test_long_words_do_not_widen_the_table():
    long = Outcome("1.1", state="wrong", error="E: " + "x" * 5000)
    assert max(map(len, text([Graded("a.ipynb", 1, [long])]).splitlines())) < 130


@pytest.mark.parametrize(
    ("states", "expected"),
    [(["right", "right"], 0), (["right", "wrong"], 1), (["untouched", "stopped"], 1),
     (["right", "not graded"], 2), ([], 2)],
)  # fmt: skip
def test_the_exit_status_is_that_of_the_worst(states, expected):
    one = Graded("a", 1, [Outcome(f"1.{i}", state=state) for i, state in enumerate(states)])
    assert status([one]) == expected
    assert status([Graded("b", 1, [Outcome("1.1", state="right")]), one]) == expected


def test_the_json_has_everything_and_can_be_read_back():
    graded = some()
    content = json.loads(to_json(graded, {"cell_s": 5}))
    assert content["status"] == 2
    assert content["ungraded"] == 1
    assert content["limits"] == {"cell_s": 5}
    ann, bob, _ = content["notebooks"]
    assert (ann["points"], ann["of"], ann["graded"]) == (2, 2, True)
    assert bob["exercises"][0]["findings"][1]["hint"] == "look at `rank`"
    assert bob["exercises"][0]["passed"] is False
    assert [from_wire(one) for one in content["notebooks"]] == graded


GOOD = Graded("a", 1, [Outcome("1.1")]).to_wire()


@pytest.mark.parametrize(
    "wire",
    [{}, [], {"exercises": 3}, {"exercises": [{"state": "best"}]},
     {**GOOD, "seconds": "x"}, {**GOOD, "notes": 3}, {**GOOD, "problems": [3]},
     {**GOOD, "exercises": [{**GOOD["exercises"][0], "exercise": "x"}]},
     {**GOOD, "exercises": [{**GOOD["exercises"][0], "findings": ["x"]}]}],
)  # fmt: skip
def test_what_no_runner_has_said_is_refused(wire):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_wire(wire)
