"""What a terminal shows of a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.views.terminal import Screen, render, to_html, to_text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("a\nb\n", "a\nb"),
        ("10%\r20%\r100%\n", "100%"),
        ("100%\r5%", "5%0%"),
        ("100%\r\x1b[K5%", "5%"),
        ("abc\x08\x08X", "aXc"),
        ("a\r\nb", "a\nb"),
        ("one\ntwo\x1b[A\rX", "Xne\ntwo"),
        ("a\x1b[3Cb", "a   b"),
        ("\x1b]0;title\x07text", "text"),
        ("tail\x1b[2K", ""),
        ("", ""),
        ("a\n\nb", "a\n\nb"),
    ],
)
def test_control_characters_do_what_a_terminal_does(written, shown):
    assert to_text(render(written)).rstrip() == shown


def test_colours_become_styled_spans_that_end():
    html = to_html(render("a \x1b[1;31mred\x1b[0m \x1b[38;5;196mx\x1b[39m \x1b[38;2;1;2;3my\x1b[m"))
    assert html.count("<span") == html.count("</span>") == 3
    assert "font-weight:bold" in html
    assert "rgb(255,0,0)" in html
    assert "rgb(1,2,3)" in html


def test_a_progress_bar_of_many_updates_is_one_line():
    screen = Screen()
    for done in range(1000):
        screen.write(f"\r{done:4d}/999")
    assert to_text(screen.lines()) == " 999/999"


@given(st.text(alphabet="ab\n\r\x08\x1b[0123m;KA", max_size=60), st.integers(0, 60))
def test_it_does_not_matter_where_a_stream_is_cut_into_messages(text, cut):
    screen = Screen()
    screen.write(text[:cut])
    screen.write(text[cut:])
    assert screen.lines() == render(text)


@given(st.text(max_size=80))
def test_html_never_holds_a_tag_of_the_text(text):
    html = to_html(render(text))
    bare = html.replace("</span>", "").replace("<span style=", "")
    assert "<" not in bare
