"""Answers come from the notebook handed in; everything else from the lab as handed out."""

from __future__ import annotations

import re

import pytest
from handed_in import BEGIN, GOOD, STUBS, TORCH, cells, code, text, write

from workbench.labs.grading.reading import merge, read


@pytest.fixture
def merged(tmp_path):
    lab = read(write(tmp_path / "lab.ipynb", cells()))

    def make(made):
        return merge(lab, read(write(tmp_path / "handed_in.ipynb", made, lab=None)))

    return make


def answers(found):
    return {item.exercise: item.sources for item in found.items if item.kind == "answer"}


def all_of(found):
    return [source for item in found.items for source in item.sources]


def test_answers_stand_where_the_lab_has_its_exercises(merged):
    found = merged(cells(GOOD))
    assert answers(found) == {number: [source] for number, source in GOOD.items()}
    assert found.untouched == set()
    assert found.notes == []
    assert found.exercises == list(STUBS)
    assert all_of(found)[:2] == [BEGIN, TORCH]


def test_untouched_exercises_are_told_apart_and_run_as_they_are(merged):
    found = merged(cells({"1.1": GOOD["1.1"], "1.2": STUBS["1.2"] + "   \n", "1.3": ""}))
    assert found.untouched == {"1.2", "1.3", "1.5"}
    assert answers(found)["1.3"] == [STUBS["1.3"]]
    assert found.notes == []


def numbers(note):
    """Return how many cells a note counts, and the numbers of these cells in the original lab."""
    return re.findall(r"\d+", note.partition(":")[0])


def test_edited_steps_and_checks_change_nothing_and_are_named(merged):
    made = cells(GOOD)
    made[1]["source"] = BEGIN.replace("3)", "1)")
    made[2]["source"] = "# gone"
    made[5]["source"] = "labs.check = print"
    found = merged(made)
    assert all_of(found) == all_of(merged(cells(GOOD)))
    assert [numbers(note) for note in found.notes] == [["2", "2", "3"], ["1", "6"]]
    assert ["check" in note.partition(":")[0] for note in found.notes] == [False, True]


def test_missing_cells_are_restored_and_named(merged):
    found = merged([code(GOOD["1.2"])])
    assert answers(found)["1.2"] == [GOOD["1.2"]]
    assert answers(found)["1.1"] == [STUBS["1.1"]]
    assert found.untouched == {"1.1", "1.3", "1.5"}
    assert [n for n in found.notes if n.startswith("exercise 1.3 was missing")]
    assert any(note.startswith("3 cells") and "missing" in note for note in found.notes)
    assert any(note.startswith("4 checks were missing") for note in found.notes)


def test_cells_in_another_order_come_to_their_places(merged):
    assert all_of(merged(list(reversed(cells(GOOD))))) == all_of(merged(cells(GOOD)))


def test_of_several_attempts_the_last_that_is_not_the_empty_one_counts(merged):
    first, second, empty = "# YOUR CODE 1.2\ntotal = 1", "# YOUR CODE 1.2\ntotal = 2", STUBS["1.2"]
    made = cells(GOOD)
    made[7:8] = [code(first), code(second), code(empty)]
    assert answers(merged(made))["1.2"] == [second]


def test_a_cell_without_its_marker_is_known_by_its_metadata(merged):
    assert answers(merged(cells({"1.2": "total = 5"})))["1.2"] == ["total = 5"]


def test_what_the_marker_says_goes_before_what_a_copied_cell_carries_along(merged):
    made = cells(GOOD)
    made[7] = code(GOOD["1.2"], exercise="1.1")
    assert answers(merged(made))["1.2"] == [GOOD["1.2"]]
    assert answers(merged(made))["1.1"] == [GOOD["1.1"]]


def test_own_cells_beside_an_exercise_run_with_it(merged):
    made = cells(GOOD)
    made[7:8] = [code("import math"), text("so"), made[7], code("total = int(total)")]
    found = merged(made)
    assert answers(found)["1.2"] == ["import math", GOOD["1.2"], "total = int(total)"]
    assert found.notes == []


def test_halves_of_a_cell_that_was_split_both_run(merged):
    made = cells(GOOD)
    made[7:8] = [code("# YOUR CODE 1.2\n%pull square", exercise="1.2"),
                 code("total = sum(square)", exercise="1.2")]  # fmt: skip
    assert answers(merged(made))["1.2"] == ["# YOUR CODE 1.2\n%pull square", "total = sum(square)"]


def test_own_cells_elsewhere_are_not_run_and_named(merged):
    made = [code("import os"), *cells(GOOD)]
    found = merged(made)
    assert all_of(found) == all_of(merged(cells(GOOD)))
    (note,) = found.notes
    assert note.startswith("1 cell ")
    assert "(cell 1 of" in note


def test_checks_that_a_student_repeats_are_not_taken_for_answers(merged):
    made = cells(GOOD)
    made[7:7] = [code('labs.check("1.1")\n# again\nlabs.progress()\n')]
    assert answers(merged(made))["1.2"] == [GOOD["1.2"]]


def test_without_ids_steps_are_known_by_their_tags(merged):
    made = cells(GOOD)
    for cell in made:
        cell.pop("id", None)
    made[2]["source"] = "%%distributed\nimport nothing"
    found = merged(made)
    assert answers(found)["1.1"] == [GOOD["1.1"]]
    assert [numbers(note) for note in found.notes] == [["1", "3"]]


def test_a_long_notebook_of_lines_that_are_nearly_checks_is_read_at_once(merged):
    made = [*cells(GOOD), code("\n" * 20_000 + "labs.check(" + "#" * 20_000 + "\n" * 20_000)]
    assert answers(merged(made))["1.1"] == [GOOD["1.1"]]
