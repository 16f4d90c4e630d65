"""Run names in pictures: letters that no font has, and names that are too long."""

import subprocess
import sys
import warnings

import pytest
from fake_run import fake_snapshot

from workbench.errors import PlanError
from workbench.shared.plan import MOST_NAME, check_name
from workbench.views import drawing
from workbench.views.drawing import clipped, width_in
from workbench.views.live.figure import run_png


@pytest.fixture
def plain(monkeypatch):
    """A machine with no other fonts than matplotlib's own."""
    for one in (drawing.families, drawing._drawn, drawing.readable):
        one.cache_clear()
    monkeypatch.setattr(drawing, "FONTS", ())
    yield
    for one in (drawing.families, drawing._drawn, drawing.readable):
        one.cache_clear()


def test_letters_without_a_font_are_spelled(plain):
    assert drawing.readable("base é Ж ∑") == "base é Ж ∑"
    assert drawing.readable("🚀") == ":rocket:"
    assert drawing.readable("テスト") == "tesuto"
    assert drawing.readable("实") == "u5B9E"


def test_a_name_of_any_letters_is_drawn_without_a_warning(plain):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_png(fake_snapshot(name="实验-🚀-テスト-한국")).startswith(b"\x89PNG")


def test_a_long_name_is_shortened_in_its_middle():
    assert drawing.shortened("base", 48) == "base"
    assert drawing.shortened("a" * 60 + "b" * 60, 9) == "aaaa…bbbb"
    assert drawing.shortened("实" * 60, 9) == "实实…实实"


def test_clipping_a_long_name_measures_few_lengths(monkeypatch):
    text = "abcdefghij" * 50
    width_in.cache_clear()
    short = clipped(text, 9, 1.9, "bold")
    assert short.startswith("abcde")
    assert short.endswith("fghij")
    assert 1.5 < width_in(short, 9, "bold") <= 1.9
    assert width_in.cache_info().misses < 15


def test_a_name_is_at_most_a_hundred_letters():
    check_name("n" * MOST_NAME)
    with pytest.raises(PlanError, match=r"101.*WB-PLAN-090") as told:
        check_name("n" * (MOST_NAME + 1))
    assert str(MOST_NAME) in told.value.allowed
    with pytest.raises(PlanError, match="WB-PLAN-089"):
        check_name(5)


def test_pictures_are_imported_on_a_thread_that_no_interrupt_strikes():
    code = (
        "import threading, importlib, workbench.views.drawing as d\n"
        "names = []\n"
        "real = importlib.import_module\n"
        "def seen(*name):\n"
        "    names.append(threading.current_thread() is threading.main_thread())\n"
        "    return real(*name)\n"
        "d.importlib.import_module = seen\n"
        "with d.own_style({}): pass\n"
        "assert names and not any(names), names\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
