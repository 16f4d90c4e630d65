"""Checks: what they ask for, what they say, and that nothing a student writes breaks them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from workbench.errors import PlanError
from workbench.labs import answers, asking, build, plain, shows
from workbench.labs.answers import Check, Stuck
from workbench.labs.checks import lab_2
from workbench.labs.grading.processes import MARK
from workbench.labs.shows import Namespaces, beside, take_home

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"


def said(ask, **names):
    """What a check says when it asks for something of these names."""
    check = Check("3.2", names)
    with pytest.raises(Stuck):
        ask(check)
    (finding,) = check.findings
    assert not finding.right
    return finding


@pytest.mark.parametrize("value", [None, ...])
def test_an_empty_answer_is_named_with_its_exercise(value):
    finding = said(lambda c: c.value("slow"), slow=value)
    assert "`slow`" in finding.words
    assert "exercise 3.2" in finding.hint


def test_a_missing_name_says_which_cell_to_run():
    finding = said(lambda c: c.value("slow"))
    assert "`slow`" in finding.words
    assert "exercise 3.2" in finding.hint


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (0.7154507, True), (0.71545, True), (0.715, True), (0.72, True), (0.71, True),
        (0.7, False), (0.716, False), (0.7148, False), (0.7202, False), (math.nan, False),
    ],
)  # fmt: skip
def test_a_number_read_from_a_run_may_be_cut_or_rounded_to_two_decimals(found, right):
    assert answers.as_read(found, 0.7154507147) == right


@pytest.mark.parametrize(
    ("found", "right"),
    [(1.035, True), (1.036, True), (1.03571, True), (1.034, False), (1.04, False)],
)
def test_three_decimals_can_be_asked_for(found, right):
    assert answers.as_read(found, 29 / 28, least=3) == right


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "True"), ("fast", "'fast'"), ("42", "'42'"), ([1, 2], "[1, 2]"), (math.nan, "nan"),
        (math.inf, "inf"), (np.zeros((2, 2)), "array("),
    ],
)  # fmt: skip
def test_what_is_no_number_is_shown(value, words):
    assert words in said(lambda c: c.number_of("x"), x=value).words


def test_numbers_of_all_kinds_are_taken():
    names = {"a": 1, "b": np.float32(2), "c": np.array([3.0])[0], "d": "4"}
    check = Check("1.1", names)
    assert [check.number_of(name) for name in "abc"] == [1, 2, 3]
    assert check.whole("a") == 1
    assert "'4'" in said(lambda c: c.number_of("d"), **names).words
    assert "2.5" in said(lambda c: c.whole("x"), x=2.5).words


def test_a_wrong_shape_is_said_with_both_shapes():
    finding = said(lambda c: c.array("x", (3,)), x=np.zeros((3, 1)))
    assert "(3, 1)" in finding.words
    assert "(3,)" in finding.words
    assert re.search(r"\b4\b.*\b3\b", said(lambda c: c.items("x", 3), x=[1, 2, 3, 4]).words)
    assert "`x`" in said(lambda c: c.array("x"), x=[[1], [1, 2]]).words


def test_a_choice_is_compared_without_regard_to_case():
    assert Check("1.1", {"x": " Ring "}).text("x", ["ring", "tree"]) == "ring"
    assert "'tree'" in said(lambda c: c.text("x", ["ring", "tree"]), x="star").hint


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda n: 1 / 0, "ZeroDivisionError"),
        (lambda n: None, "returned None"),
        (lambda: 1, "TypeError"),
        (3, "`f` is 3"),
        (sys.exit, "raised SystemExit"),
    ],
)
def test_a_function_that_fails_is_said_with_its_arguments(function, words):
    assert words in said(lambda c: c.call("f", 2), f=function).words


def test_a_function_that_never_ends_is_interrupted_and_what_was_timed_before_goes_on(monkeypatch):
    def endless():
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    monkeypatch.setattr(answers, "CALL_LIMIT_S", 0.05)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        finding = said(lambda c: c.call("f"), f=endless)
        assert "0.05 s" in finding.words
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert 0 < signal.setitimer(signal.ITIMER_REAL, 0)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_function_that_raises_is_shown_with_its_arguments_and_a_hint():
    finding = said(lambda c: c.call("share", 3, 0), share=lambda a, b: a / b)
    assert "share(3, 0) raised ZeroDivisionError" in finding.words
    assert finding.hint


def test_arguments_too_long_for_a_message_are_given_in_words():
    finding = said(
        lambda c: c.number_from("f", [0] * 99, given="99 zeros"), f=lambda values: values[99]
    )
    assert "99 zeros, `f` raised IndexError" in finding.words
    assert "[0" not in finding.words


@pytest.mark.parametrize("returned", ["fast", True, math.nan, [1, 2], 10**400])
def test_a_function_that_is_to_return_a_number(returned):
    finding = said(lambda c: c.number_from("f", 2, 0.5), f=lambda a, b: returned)
    assert "f(2, 0.5) returned" in finding.words
    assert Check("1.1", {"f": lambda a: np.float32(a)}).number_from("f", 2) == 2.0


def test_a_result_that_is_no_number_at_all_is_not_the_sum():
    words, _ = lab_2._unlike(0, 2, np.array([math.nan, 11.0]), 11, "2 numbers", False)
    assert "place 0 on worker 0" in words


@pytest.mark.parametrize(("part", "named"), [(111 / 3, True), (11.0, False), (112.0, False)])
def test_a_mean_in_place_of_a_sum_is_named(part, named):
    words, _ = lab_2._unlike(0, 3, np.full(2, part), 111, "2 numbers", True)
    assert ("mean" in words) == named


def test_a_run_that_does_not_exist_is_asked_for_by_its_name():
    finding = said(lambda c: c.run("never-ran"))
    assert "never-ran" in finding.words
    assert "--name never-ran" in finding.hint


def test_without_a_cluster_the_next_step_is_said():
    finding = said(lambda c: c.engines("x"))
    assert "No cluster" in finding.words
    assert "%cluster start" in finding.hint


@pytest.mark.parametrize("number", ["3", 3.2, "3,2", "", None, "x.y"])
def test_an_exercise_is_named_by_lab_and_place(number):
    if number == 3.2:
        number = 3.25
    with pytest.raises(PlanError):
        answers.find(number)


def test_an_unknown_exercise_lists_those_of_the_lab():
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*1\.1, 1\.2"):
        answers.find("1.9")
    with pytest.raises(PlanError, match=r"lab.*WB-PLAN-037"):
        answers.find("77.1")


@pytest.mark.parametrize("path", sorted(SOLUTIONS.glob("lab_*.md")), ids=lambda path: path.stem)
def test_a_check_expects_an_exercises_cell_where_the_lab_has_it(path):
    for piece in build.read(path).exercises:
        on_engines = piece.solution.startswith("%%")
        assert (answers.find(piece.exercise).cell == "the engines") is on_engines, piece.exercise


def test_every_lab_has_at_least_three_exercises_in_a_row():
    for lab in answers.labs():
        numbers = [found.number for found in answers.exercises(lab)]
        assert numbers == [f"{lab}.{i}" for i in range(1, len(numbers) + 1)]
        assert len(numbers) >= 3


def test_a_lab_is_built_of_checks_that_say_in_their_outputs_that_they_pass():
    import nbformat
    from IPython.core.formatters import DisplayFormatter

    from workbench.labs import build

    def shown(thing):
        data, metadata = DisplayFormatter().format(thing)
        output = nbformat.v4.new_output("display_data", data=data, metadata=metadata)
        return nbformat.v4.new_code_cell("check", outputs=[output])

    good = asking.check("1.5", {"crossing_s": lambda n, c_s: c_s * n / (n - 1)})
    bad = asking.check("1.5", {"crossing_s": lambda n, c_s: c_s})
    words = nbformat.v4.new_output("display_data", data={"text/plain": "1.5 x: right (ran in y)"})
    assert build._passed(shown(good))
    assert not build._passed(shown(bad))
    assert not build._passed(nbformat.v4.new_code_cell("check", outputs=[words]))
    assert build._still(shown(good).outputs[0], 1)["metadata"] == {}


def test_a_report_says_what_is_right_and_never_raises():
    good = asking.check("1.5", {"crossing_s": lambda n, c_s: c_s * n / (n - 1)})
    assert good.passed
    assert repr(good).startswith("1.5 The crossing point: right (ran in the notebook)")
    bad = asking.check("1.5", {"crossing_s": lambda n, c_s: c_s})
    assert not bad.passed
    assert "hint: " in repr(bad)
    assert "not yet" in bad.html()
    odd = asking.check("1.5", {"crossing_s": lambda n, c_s: object()})
    assert not odd.passed
    assert json.loads(json.dumps(bad.to_wire()))["passed"] is False
    assert "not yet" in repr(asking.progress(1))
    asking.forget(1)
    assert "not yet" not in repr(asking.progress(1))


def test_what_a_check_did_not_foresee_is_said_and_not_raised(monkeypatch):
    def breaks(check):
        raise RuntimeError("broken")

    unforeseen = answers.Exercise("1.1", "made up", "the notebook", breaks)
    monkeypatch.setattr(asking, "find", lambda number: unforeseen)
    report = asking.check("1.1", {})
    assert not report.passed
    assert "RuntimeError: broken" in repr(report)


def test_a_check_never_ends_the_notebook():
    class Leaves:
        def __float__(self):
            raise SystemExit(3)

    leaves = asking.check("1.5", {"crossing_s": lambda n, c_s: Leaves()})
    assert not leaves.passed
    assert "SystemExit" in repr(leaves)


def test_numbers_are_shown_as_numbers():
    report = asking.check(
        "5.1", {"staleness": lambda events: [1 for what, _ in events if what == "push"]}
    )
    assert "returned [1, 1]" in repr(report)


def test_hints_of_students_text_are_escaped():
    report = asking.check("1.5", {"crossing_s": "<script>alert(1)</script>"})
    assert "<script>" not in report.html()


def test_formulas_stand_beside_what_was_measured():
    table = beside(
        ("a step", "T/2", 0.02, 0.021, "s"),
        ("sent", "2M", 2048.0, 2048.0, "bytes"),
        ("share", "(p-1)/p", 0.5, math.nan, "share"),
        ("nothing", "0", 0.0, 1.0),
    )
    assert [row[-1] for row in table.rows] == ["1.05", "1.00", "–", "–"]
    assert table.rows[0][2:4] == ["20 ms", "21 ms"]
    assert table.rows[2][2:4] == ["50.0 %", "–"]


@pytest.mark.parametrize(
    ("runs", "to", "words"), [((), "lab.tar", "WB-PLAN-049"), (("none",), "l.zip", "none")]
)
def test_what_cannot_be_taken_home_is_said(tmp_path, runs, to, words):
    with pytest.raises((PlanError, KeyError), match=words):
        take_home(*runs, to=tmp_path / to)
    assert list(tmp_path.iterdir()) == []


def test_each_run_taken_home_has_a_folder_of_its_own_inside_the_file():
    named = [SimpleNamespace(name=name) for name in ("a", "../../a", "/tmp/x", "..", "a", "b c")]
    folders = shows._folders(named)
    assert list(folders) == ["a", "_.._a", "_tmp_x", "run", "a (2)", "b c"]
    assert list(folders.values()) == named


def test_names_whose_values_cannot_be_looked_at_are_shown_by_their_kind():
    class Frame:
        shape = (2, 2)

    class Odd:
        shape = None

    class Broken:
        def __repr__(self):
            raise OSError

    here = {}
    exec(shows._SHOW, here)
    held = here["_labs_names"]({"f": Frame(), "o": Odd(), "b": Broken(), "a": np.arange(4.0)}, ())
    assert held == {
        "a": "ndarray 4 [0.0, 1.0, 2.0, 3.0]", "b": "<Broken>", "f": "Frame 2x2", "o": "<Odd>",
    }  # fmt: skip


def test_the_picture_of_names_says_who_holds_what():
    many = {f"name_{i}": "1" for i in range(12)}
    picture = Namespaces({"x": "<b>"}, [{}, many])
    assert "engine 1:\n  name_0 = 1" in picture.text()
    assert "engine 0:\n  no " in picture.text()
    assert "and 4 more" in picture.svg()
    assert "<b>" not in picture.svg()


# -- how many engines a lab may start


def test_many_engines_start_only_where_memory_and_limits_allow_it(monkeypatch):
    monkeypatch.delenv("WORKBENCH_MAX_ENGINES", raising=False)
    monkeypatch.setattr(asking.turns, "memory", lambda: (10**10, 10**11))
    assert asking.can_run(64, memory_bytes=1e10)
    assert not asking.can_run(64, memory_bytes=1.1e10)
    monkeypatch.setenv("WORKBENCH_MAX_ENGINES", "63")
    assert not asking.can_run(64, memory_bytes=1e10)
    assert asking.can_run(63, memory_bytes=1e10)
    monkeypatch.setenv(MARK, "of a grader")
    assert not asking.can_run(63, memory_bytes=1e10)


def test_a_check_that_fewer_engines_answer_asks_for_all_of_them():
    class Short(asking.Check):
        def __init__(self, lost):
            answer = {"values": [plain.pack(3)], "lost": lost}
            super().__init__("10.2", SimpleNamespace(ask=lambda *_: answer))

    whole = Short([])
    assert whole.ask("x") == [3]
    whole.need_all_engines()
    short = Short([0, 2])
    short.ask("x")
    with pytest.raises(Stuck):
        short.need_all_engines()
    assert "0, 2" in short.findings[-1].words
