"""The words that a figure draws, and their positions."""

from __future__ import annotations

from typing import Any


def words_of(figure: Any) -> list[tuple[str, Any]]:
    """Every drawn text, with its box in pixels."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    found = list(figure.texts)
    for axes in figure.axes:
        found += axes.texts
        found += [axes._left_title, axes.xaxis.label]
        for labels, axis, at in (
            (axes.get_xticklabels(), axes.get_xlim(), 0),
            (axes.get_yticklabels(), axes.get_ylim(), 1),
        ):
            low, high = sorted(axis)
            found += [
                label
                for label in labels
                if label.get_visible() and low <= label.get_position()[at] <= high
            ]
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in found
        if text.get_text().strip()
    ]
