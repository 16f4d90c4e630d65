"""The notebook's names and the engines', side by side: what lives where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .picture import Canvas, Picture, say, width_of

_WIDTH, _LEFT, _RIGHT = 680.0, 250.0, 300.0
_LINE, _HEAD, _PAD, _GAP = 15.0, 22.0, 8.0, 12.0
_MOST = 8
"""Names that are shown of each; the rest is counted."""


@dataclass(frozen=True)
class Namespaces(Picture):
    """What the notebook's process and each engine's process hold.

    Attributes:
        notebook: Shortened values by name.
        engines: The same of each engine, in the order of the ranks.
    """

    notebook: Mapping[str, str]
    engines: Sequence[Mapping[str, str]]

    def text(self) -> str:
        """The same as text, a paragraph per process."""
        found = [_paragraph("the notebook", self.notebook)]
        found += [_paragraph(f"engine {i}", held) for i, held in enumerate(self.engines)]
        return "\n".join(found)

    def canvas(self) -> Canvas:
        """The notebook on the left, the engines on the right, what crosses in between."""
        y, body, middles = 20.0, [], []
        x = _WIDTH - _RIGHT
        for rank, held in enumerate(self.engines):
            part, high = _box(x, y, _RIGHT - 1, f"engine {rank} · rank {rank}", held)
            body += part
            middles.append(y + high / 2)
            y += high + _GAP
        height = max(y, _high(self.notebook) + 40)
        top = (height - _high(self.notebook)) / 2
        part, _ = _box(1, top, _LEFT - 1, "the notebook's kernel", self.notebook)
        body += part
        middle = height / 2
        for target in middles:
            body.append(
                f'<path class="l" d="M{_LEFT:.0f} {middle:.1f}C{_LEFT + 60:.0f} {middle:.1f} '
                f'{x - 60:.0f} {target:.1f} {x:.0f} {target:.1f}"/>'
            )
        words = (_LEFT + x) / 2
        body.append(say(words, 12, "%push →   ← %pull", "m", anchor="middle"))
        body.append(say(1, 12, "a cell without a magic runs here", "m"))
        body.append(say(_WIDTH, 12, "a %%distributed cell runs here", "m", anchor="end"))
        title = f"Names of the notebook and of {len(self.engines)} engines"
        return Canvas(_WIDTH, height + 4, body, title, self.text())


def _high(held: Mapping[str, str]) -> float:
    lines = min(len(held), _MOST) + (len(held) > _MOST) or 1
    return _HEAD + lines * _LINE + _PAD


def _box(
    x: float, y: float, width: float, title: str, held: Mapping[str, str]
) -> tuple[list[str], float]:
    high = _high(held)
    body = [
        f'<rect class="b" rx="6" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{high:.1f}"/>',
        say(x + 10, y + 16, title, bold=True),
    ]
    lines = [f"{name} = {value}" for name, value in list(held.items())[:_MOST]]
    if len(held) > _MOST:
        lines.append(f"and {len(held) - _MOST} more")
    for i, line in enumerate(lines or ["holds no name of yours"]):
        most = int((width - 20) / width_of("x"))
        shown = line if len(line) <= most else line[: most - 1] + "…"
        body.append(say(x + 10, y + _HEAD + 11 + i * _LINE, shown, "" if lines else "m"))
    return body, high


def _paragraph(who: str, held: Mapping[str, str]) -> str:
    lines = [f"  {name} = {value}" for name, value in held.items()]
    return "\n".join([f"{who}:", *(lines or ["  no name of yours"])])
