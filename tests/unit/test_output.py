"""Output blocks of a cell on several ranks."""

from __future__ import annotations

import base64

import pytest

from workbench.shared.members import Member, ranges
from workbench.views.output import OutputBoard

MEMBERS = {
    10: Member.of_ranks(0, device="cuda:0"),
    11: Member.of_ranks(1, device="cuda:1"),
    12: Member.of_ranks(2, device="cpu"),
}


def out(board: OutputBoard, key: int, text: str, name: str = "stdout") -> None:
    board.message(key, "stream", {"name": name, "text": text})


def show(board: OutputBoard, key: int, data: dict, **more: object) -> None:
    board.message(key, "display_data", {"data": data, "metadata": {}, **more})


def fail(board: OutputBoard, key: int, value: str) -> None:
    content = {
        "ename": "ValueError",
        "evalue": value,
        "traceback": [f"\x1b[31mValueError\x1b[0m: {value}"],
    }
    board.message(key, "error", content)


@pytest.fixture
def board() -> OutputBoard:
    return OutputBoard(MEMBERS)


def test_equal_output_of_several_ranks_is_drawn_once_with_a_count(board):
    for key in MEMBERS:
        out(board, key, "tensor([3.])\n")
    assert board.text() == "[ranks 0-2] tensor([3.])"
    assert board.html().count("tensor([3.])") == 1
    assert "ranks 0-2 · same output, 3 times" in board.html()


def test_different_output_is_drawn_per_rank_under_its_label(board):
    out(board, 10, "0 of 3\n")
    out(board, 11, "1 of 3\n")
    assert board.text() == "[rank 0] 0 of 3\n[rank 1] 1 of 3"
    assert "rank 1 · cuda:1" in board.html()


def test_the_order_of_arrival_between_ranks_does_not_change_the_render():
    one, other = OutputBoard(MEMBERS), OutputBoard(MEMBERS)
    for key in (10, 11, 12):
        out(one, key, f"{key}\n")
    for key in (12, 10, 11):
        out(other, key, f"{key}\n")
    assert one.render(True) == other.render(True)


def test_ranks_that_are_not_neighbours_are_named_as_ranges(board):
    out(board, 10, "a\n")
    out(board, 11, "b\n")
    out(board, 12, "a\n")
    assert board.text() == "[ranks 0, 2] a\n[rank 1] b"
    assert ranges([5, 1, 2, 3]) == "1-3, 5"


def test_the_final_render_drops_nothing_and_the_running_one_sends_the_tail(board):
    out(board, 10, "".join(f"line {i}\n" for i in range(5000)))
    running, final = board.render(False), board.render(True)
    assert len(running["text/html"]) < len(final["text/html"]) / 10
    assert "line 4999" in running["text/plain"]
    assert "4800 earlier lines" in running["text/plain"]
    assert all(
        f"line {i}" in final["text/plain"].split("[rank 0] ")[i + 1] for i in (0, 2500, 4999)
    )


def test_one_huge_line_is_still_shown_while_running(board):
    out(board, 10, "x" * 100_000)
    assert "x" * 100_000 in board.render(False)["text/plain"]


def test_text_that_looks_like_html_is_escaped_everywhere():
    board = OutputBoard({0: Member.of_ranks(0, device="<b>evil</b>")})
    attack = "<img src=x onerror=alert(1)>"
    out(board, 0, attack)
    out(board, 0, f"\x1b[31m{attack}\x1b[0m", "stderr")
    show(board, 0, {"text/plain": attack})
    show(board, 0, {"text/markdown": attack})
    show(board, 0, {"image/png": '" onerror="alert(1)', "text/plain": '"><script>'})
    fail(board, 0, attack)
    html = board.html()
    assert "<img src=x" not in html
    assert "<script" not in html
    assert "<b>evil" not in html
    assert 'onerror="alert' not in html


def test_rich_output_is_drawn_in_the_block(board):
    png = base64.b64encode(b"picture").decode()
    show(board, 10, {"text/html": "<table><tr><td>7</td></tr></table>", "text/plain": "7"})
    show(board, 11, {"image/png": png, "text/plain": "<Figure>"})
    show(board, 12, {"image/svg+xml": "<svg></svg>", "text/plain": "drawing"})
    html = board.html()
    assert "<table><tr><td>7" in html
    assert f"data:image/png;base64,{png}" in html
    assert "<svg></svg>" in html
    assert board.text() == "[rank 0] 7\n[rank 1] <Figure>\n[rank 2] drawing"
    assert board.take_republished() == []


@pytest.mark.parametrize(
    "bundle",
    [
        {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "Slider"},
        {"application/javascript": "alert(1)", "text/plain": "js"},
        {"application/vnd.vegalite.v5+json": {}, "text/plain": "chart"},
        {"text/html": "<div></div><script>draw()</script>", "text/plain": "plot"},
    ],
)
def test_what_needs_the_front_end_is_handed_on_once_as_it_came(board, bundle):
    show(board, 10, bundle)
    assert board.take_republished() == [bundle]
    assert board.take_republished() == []
    assert "<script" not in board.html()
    assert bundle["text/plain"] in board.text()


def test_an_error_is_shown_once_with_all_ranks_that_had_it(board):
    for key, value in ((10, "bad batch"), (11, "bad batch"), (12, "other")):
        fail(board, key, value)
    assert board.text() == "[ranks 0-1] ValueError: bad batch\n[rank 2] ValueError: other"
    assert board.html().count("bad batch") == 1
    assert "rank 2 · cpu · ValueError" in board.html()


def test_errors_that_differ_in_numbers_alone_are_one_with_what_each_says(board):
    for key, value in ((10, "336x8 at 0x7f01"), (11, "344x8 at 0x7e02"), (12, "344x8 at 0x7e02")):
        fail(board, key, value)
    assert board.text().splitlines() == [
        "[ranks 0-2] ValueError: 336x8 at 0x7f01",
        "[ranks 0-2] ranks 1-2: ValueError: 344x8 at 0x7e02",
    ]
    html = board.html()
    assert "ranks 0-2 · same error, 3 times · ValueError" in html
    assert html.count("border-left") == 1
    assert "ranks 1-2: ValueError: 344x8" in html


def test_output_before_an_error_stays(board):
    out(board, 10, "before\n")
    fail(board, 10, "x")
    assert board.text() == "[rank 0] before\n[rank 0] ValueError: x"


def test_clear_output_removes_at_once_or_with_the_next_message(board):
    out(board, 10, "old\n")
    board.message(10, "clear_output", {"wait": True})
    assert "old" in board.text()
    out(board, 10, "new\n")
    assert board.text() == "[rank 0] new"
    board.message(10, "clear_output", {"wait": False})
    assert board.empty


def test_update_display_data_replaces_in_place_and_only_in_its_rank(board):
    for key in (10, 11):
        show(board, key, {"text/plain": "1 %"}, transient={"display_id": "bar"})
    out(board, 10, "after\n")
    update = {"data": {"text/plain": "99 %"}, "transient": {"display_id": "bar"}}
    board.message(10, "update_display_data", update)
    assert board.text() == "[rank 0] 99 %\n[rank 0] after\n[rank 1] 1 %"


def test_stdout_and_stderr_keep_their_order_and_stderr_is_marked(board):
    out(board, 10, "a\n")
    out(board, 10, "b\n", "stderr")
    out(board, 10, "c\n")
    assert board.text() == "[rank 0] a\n[rank 0] b\n[rank 0] c"
    assert board.html().count("background:rgba") == 1


def test_a_board_without_output_is_empty(board):
    assert board.empty
    assert board.render(True) == {"text/html": "", "text/plain": ""}
    out(board, 10, "x")
    assert not board.empty
