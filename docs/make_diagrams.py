"""Writes the pictures of docs/teaching.md and the decision tree of docs/choosing.md.

python docs/make_diagrams.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "diagrams"

TREE = [
    (
        ["Does the model fit on one device,", "with gradients and optimizer state?"],
        "no",
        ["sharded", "or model_split on slow links,", "hybrid with many workers"],
    ),
    (["Is one device too slow for you?"], "no", ["one_device"]),
    (
        ["In a step, does the computation", "take longer than the all-reduce?"],
        "no",
        ["local_sgd", "or mirrored with a larger batch", "or with compression"],
    ),
    (
        ["Are all workers equally fast?"],
        "no",
        [
            "mirrored --on-straggler shed",
            "or parameter_server, if stale",
            "gradients are acceptable",
        ],
    ),
]
"""Each question, the answer that ends the search, and what to use then: a strategy, and others."""

END = ["mirrored"]
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.question { fill: #eef2f7; stroke: #57606a } .leaf { fill: #dbeafe; stroke: #1f6feb }
.strategy { font: bold 15px ui-monospace, monospace } .arrow { stroke: #57606a; fill: none }
.head { fill: #57606a } .page { fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .question { fill: #21262d; stroke: #8b949e }
  .leaf { fill: #0d2d5e; stroke: #58a6ff } .arrow { stroke: #8b949e } .head { fill: #8b949e }
}
"""
LEFT, RIGHT, WIDE, TALL, GAP = 160, 520, 290, 74, 34


def tree() -> str:
    """Return the decision tree: questions from top to bottom, strategies to their right."""
    parts, y = [], 10
    for lines, answer, leaf in TREE:
        middle = y + TALL / 2
        parts += [_box("question", LEFT, y, lines), _box("leaf", RIGHT, y, leaf, bold=1)]
        parts += _arrow(LEFT + WIDE / 2, middle, RIGHT - WIDE / 2, middle, answer)
        parts += _arrow(LEFT, y + TALL, LEFT, y + TALL + GAP, "yes")
        y += TALL + GAP
    parts.append(_box("leaf", LEFT, y, END, bold=1))
    size = f'width="{RIGHT + WIDE // 2 + 10}" height="{y + TALL + 10}"'
    view = f'viewBox="0 0 {RIGHT + WIDE // 2 + 10} {y + TALL + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">'
    name = "<title>Which strategy: four questions</title>"
    page = '<rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, name, f"<style>{STYLE}</style>", page, *parts, "</svg>"])


def _box(kind: str, x: float, y: float, lines: list[str], bold: int = 0) -> str:
    box = f'<rect class="{kind}" x="{x - WIDE / 2}" y="{y}" width="{WIDE}" height="{TALL}" rx="8"/>'
    first = y + TALL / 2 + 5 - 10 * (len(lines) - 1)
    texts = [
        f'<text class="{"strategy" if i < bold else "note"}" x="{x}" y="{first + 20 * i}">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    ]
    return "".join([box, *texts])


def _arrow(x: float, y: float, to_x: float, to_y: float, label: str) -> list[str]:
    down = x == to_x
    line = f'<path class="arrow" d="M{x} {y}L{to_x} {to_y}"/>'
    points = (
        f"{to_x - 5},{to_y - 8} {to_x + 5},{to_y - 8} {to_x},{to_y}" if down
        else f"{to_x - 8},{to_y - 5} {to_x - 8},{to_y + 5} {to_x},{to_y}"
    )  # fmt: skip
    at = (x + 20, (y + to_y) / 2 + 4) if down else ((x + to_x) / 2, y - 6)
    text = f'<text x="{at[0]}" y="{at[1]}">{label}</text>'
    return [line, f'<polygon class="head" points="{points}"/>', text]


def make_pictures() -> dict[str, str]:
    """Return the pictures as SVG, by file name."""
    from workbench.notebook.compare import diagram

    return {
        "which-strategy.svg": tree(),
        "mirrored-ring.svg": diagram("mirrored", 4, allreduce="ring").svg(),
        "parameter-server.svg": diagram("parameter_server", 3, servers=2).svg(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in make_pictures().items():
        (FOLDER / name).write_text(svg + "\n", encoding="utf-8")
