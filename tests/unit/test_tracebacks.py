"""What is shown of a traceback: the user's own lines; the others are counted."""

from __future__ import annotations

import json
import linecache
import sys
from types import SimpleNamespace, TracebackType
from typing import NamedTuple

import pytest

from workbench.engine.debugging import marks, tracebacks
from workbench.engine.runtime import outcome_of
from workbench.errors import FitError

CELL = "/tmp/ipykernel_1/7.py"


class LineLocation(NamedTuple):
    """As AutoGraph's."""

    filename: str
    lineno: int


def raised(source: str, names: dict[str, object] | None = None, file: str = CELL) -> TracebackType:
    """Return the traceback of a cell's error."""
    try:
        exec(compile(source, file, "exec"), names if names is not None else {})
    except Exception:
        trace = sys.exc_info()[2]
    assert trace is not None
    return trace


def lines(trace: TracebackType | None) -> list[int]:
    found = []
    while trace is not None:
        found.append(trace.tb_lineno)
        trace = trace.tb_next
    return found


def test_frames_of_libraries_are_left_out_and_counted():
    trace = raised("import json\ndef read(text):\n    return json.loads(text)\nread('{')")
    (shown,), left_out = tracebacks.fold(trace)
    assert lines(shown) == [4, 3]
    assert {frame.f_code.co_filename for frame in left_out} <= {
        json.__file__,
        json.decoder.__file__,
    }
    words = tracebacks.left_out_words(left_out)
    assert f"{len(left_out)} frames of Python" in words
    assert "--traceback full" in words


def test_nothing_is_said_where_nothing_is_left_out():
    (shown,), left_out = tracebacks.fold(raised("def f():\n    1 / 0\nf()"))
    assert lines(shown) == [3, 2]
    assert tracebacks.left_out_words(left_out) == ""


def test_a_comprehension_is_one_with_its_function():
    source = "def f(items):\n    return [\n        {}[i]\n        for i in items\n    ]\nf([1])"
    (shown,), _ = tracebacks.fold(raised(source))
    assert lines(shown) == [6, 3]


def test_a_line_that_was_generated_is_the_users(monkeypatch):
    monkeypatch.setattr(tracebacks, "_lines", {})
    file = f"/tmp/{tracebacks.MARK}abc.py"
    origin = SimpleNamespace(
        loc=SimpleNamespace(filename=CELL, lineno=5),
        function_name="step",
        source_code_line="    y = x @ w",
    )
    tracebacks.note(file, {LineLocation(file, 2): origin})
    made: dict[str, object] = {}
    exec(compile("def tf__step():\n    1 / 0", file, "exec"), made)
    shown, left_out = tracebacks.fold(raised("step()", {"step": made["tf__step"]}))
    assert left_out == []
    monkeypatch.setattr(marks, "_numbers", [lambda: {CELL: 3}])
    assert isinstance(shown[1], tracebacks.Written)
    assert shown[1].text() == "Cell In[3], line 5, in step\n----> 5 y = x @ w\n"


def test_an_error_of_ours_is_shown_below_the_users_own_lines(monkeypatch):
    monkeypatch.setattr(marks, "_numbers", [lambda: {CELL: 3}])
    source = "def train():\n    check('x')\ntrain()"
    linecache.cache[CELL] = (len(source), None, source.splitlines(keepends=True), CELL)
    names = {"FitError": FitError}
    library = (
        "def check(name):\n"
        "    raise FitError('No.', code='WB-FIT-000', seen=name, next_step='this')"
    )
    exec(compile(library, "/x/site-packages/lib.py", "exec"), names)
    try:
        exec(compile(source, CELL, "exec"), names)
    except FitError as error:
        lines = tracebacks.told(error, error.__traceback__)
    finally:
        del linecache.cache[CELL]
    assert "\n".join(lines).splitlines() == [
        "Cell In[3], line 3",
        "----> 3 train()",
        "Cell In[3], line 2, in train",
        "----> 2 check('x')",
        "",
        "FitError: No. [WB-FIT-000]",
        "  seen:    'x'",
        "  next:    this",
    ]


def test_messages_name_cells_by_their_number(monkeypatch):
    monkeypatch.setattr(marks, "_numbers", [lambda: {CELL: 22}])
    text = f'Caught ValueError\n  File "{CELL}", line 9, in get\n  File "/other.py", line 1'
    named = marks.name_cells(text)
    assert "  Cell In[22], line 9, in get" in named
    assert '  File "/other.py", line 1' in named


@pytest.mark.parametrize(("file", "name"), [
    ("/x/site-packages/torch/nn/modules/module.py", "torch"),
    (marks.__file__, "workbench"),
    (json.__file__, "Python"),
])  # fmt: skip
def test_a_frame_is_said_by_its_package(file, name):
    assert marks.package(file) == name


def test_a_quoted_traceback_keeps_the_users_frames_alone(monkeypatch):
    monkeypatch.setattr(marks, "_numbers", [lambda: {CELL: 6}])
    text = (
        "Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch\n'
        "    data = [self.dataset[idx] for idx in possibly_batched_index]\n"
        "            ~~~~~~~~~~~~^^^^^\n"
        f'  File "{CELL}", line 9, in __getitem__\n'
        "    raise ValueError('broken')\n"
        "ValueError: broken"
    )
    assert marks.fold_text(text) == (
        "Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        "  Cell In[6], line 9, in __getitem__\n"
        "    raise ValueError('broken')\n"
        "ValueError: broken"
    )


def test_a_syntax_error_names_its_cell(monkeypatch):
    monkeypatch.setattr(marks, "_numbers", [lambda: {CELL: 5}])
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\nx = )\n", CELL, "exec")
    assert outcome_of(caught.value).evalue == "unmatched ')' (Cell In[5], line 2)"


def test_a_frame_is_shown_at_the_line_where_it_was_left():
    source = (
        "def f():\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
        "        raise ValueError from e\nf()"
    )
    try:
        exec(compile(source, CELL, "exec"), {})
    except ValueError as error:
        cause = error.__cause__
    (shown,), _ = tracebacks.fold(cause.__traceback__)
    record = SimpleNamespace(_sd=None, frame=shown.tb_frame, lineno=shown.tb_frame.f_lineno)
    assert record.lineno == 5
    assert tracebacks._at_their_lines([record], shown)[0].lineno == 3
