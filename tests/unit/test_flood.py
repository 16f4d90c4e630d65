"""Output beyond a limit travels in samples, and the reader is told."""

import io
import sys

from workbench.engine.flood import EVERY_S, TAIL_CHARS, Weir, held_back


def test_what_stays_below_the_limit_is_untouched():
    shown = []
    weir = Weir(shown.append, 100)
    assert weir.write("a" * 60) == 60
    weir.write("b" * 30)
    weir.close()
    assert "".join(shown) == "a" * 60 + "b" * 30


def test_beyond_the_limit_the_newest_lines_come_once_a_second_and_the_rest_is_counted():
    shown, now = [], [0.0]
    weir = Weir(shown.append, 10, clock=lambda: now[0])
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
    assert "MB more were printed" in shown[3]


def test_the_streams_are_given_back(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with held_back():
        print("seen")
    assert sys.stdout.getvalue() == "seen\n"
    assert "write" not in vars(sys.stdout)
