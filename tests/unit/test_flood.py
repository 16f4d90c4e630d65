"""Output beyond a limit travels in samples, and the reader is told."""

import io
import sys

import pytest

from workbench.engine.output import EVERY_S, TAIL_CHARS, Throttle, held_back


def test_what_stays_below_the_limit_is_untouched():
    shown = []
    weir = Throttle(shown.append, 100)
    assert weir.write("a" * 60) == 60
    weir.write("b" * 30)
    weir.close()
    assert "".join(shown) == "a" * 60 + "b" * 30


def test_beyond_the_limit_the_newest_lines_come_once_a_second_and_the_rest_is_counted():
    shown, now = [], [0.0]
    weir = Throttle(shown.append, 10, clock=lambda: now[0])
    weir.write("x" * 10)
    for count in range(1000):
        weir.write(f"{count:09}\n")
    assert len(shown) == 1
    now[0] = EVERY_S
    weir.write("at last\n")
    assert shown[1].endswith("at last\n")
    assert len(shown[1]) == TAIL_CHARS
    weir.write("the end\n")
    weir.close()
    assert shown[2] == "the end\n"
    left_out = 1000 * 10 + len("at last\n") - TAIL_CHARS
    assert f"[about {left_out / 1e3:.1f} kB" in shown[3]


@pytest.mark.parametrize(
    ("beyond", "said"),
    [
        (3_200_000 + TAIL_CHARS, "about 3.2 MB "),
        (1_234_500_000, "about 1,234.5 MB "),
        (60_000 + TAIL_CHARS, "about 0.1 MB "),
        (4_000 + TAIL_CHARS, "about 4.0 kB "),
    ],
)
def test_the_amount_left_out_is_what_was_printed_and_not_shown(beyond, said):
    shown = []
    weir = Throttle(shown.append, 1000, clock=lambda: 0.0)
    weir.write("x" * 1000)
    piece = "y" * min(beyond, 50_000_000)
    for at in range(0, beyond, len(piece)):
        weir.write(piece[: beyond - at])
    weir.close()
    assert said in shown[-1]
    assert sum(map(len, shown[:-1])) == 1000 + TAIL_CHARS


def test_nothing_is_said_to_be_left_out_where_all_of_it_was_shown():
    shown = []
    weir = Throttle(shown.append, 10, clock=lambda: 0.0)
    for text in ("x" * 10, "line 2\n"):
        weir.write(text)
    weir.close()
    assert shown == ["x" * 10, "line 2\n"]


def test_the_streams_are_given_back(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with held_back():
        print("seen")
    assert sys.stdout.getvalue() == "seen\n"
    assert "write" not in vars(sys.stdout)
