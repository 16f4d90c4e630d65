"""`docs/errors.md`: written from the mistakes that the tests make, and compared with them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mistakes import GOOD, MODEL, Mistake

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
WRITE = os.environ.get("WORKBENCH_WRITE_DOCS") == "1"
HEAD = """# Mistakes and their messages

<!-- Written by the tests (WORKBENCH_WRITE_DOCS=1 python -m pytest tests -k mistake). -->

The first line of each message ends in a code, `[WB-FIT-...]`. The code stays the same if the words
of the message change. [error-codes.md](error-codes.md) lists all codes.

Tests make each of the mistakes below on purpose, and the page shows the error that appeared. After
each mistake the test does what the error says after `next:`, and checks that the cluster works.
Every example uses the code below, but shows only what is different. In the examples, `...` stands
for the arguments of `wb.fit` that are the same as in this code:

```python
import torch
from torch import nn
"""
HEAD += MODEL + "\n" + f"wb.fit({', '.join(f'{k}={v}' for k, v in GOOD.items())})\n```\n"
VARYING = [
    (r"0x[0-9a-f]{6,}", "0x…"),
    (r"\bpid \d+", "pid …"),
    (r"/[\w./-]*/(\w[\w.-]*)", r"…/\1"),
    (r"\b\d+(\.\d+)? (s|ms|[kMG]i?B)\b", r"… \2"),
    (r"\bengine-\d+\b", "engine-…"),
    (r"\bIn\[\d+\]", "In[…]"),
]
"""The parts that differ from machine to machine and from run to run."""


def settled(text: str) -> str:
    """Return a message without the parts that differ from run to run."""
    for pattern, instead in VARYING:
        text = re.sub(pattern, instead, text)
    return text.strip()


def short(cell: str) -> str:
    """Return a cell without the lines that all cells share."""
    lines = [
        line
        for line in cell.strip().split("\n")
        if line not in ("import torch", "from torch import nn", MODEL)
    ]
    text = "\n".join(lines)
    for name, value in GOOD.items():
        text = re.sub(rf"(?<=[(, ]){name}={re.escape(value)}(, |(?=\)$))", "", text)
    return text.replace("wb.fit()", "wb.fit(...)").replace(" --plot off", "")


def part(mistake: Mistake, shown: str) -> str:
    """Return the page's part about one mistake."""
    blocks = [f"## {mistake.title}\n", f"```python\n{short(mistake.cell)}\n```"]
    blocks.append(f"```text\n{settled(shown)}\n```")
    if mistake.cure:
        blocks.append(f"After the next step:\n\n```python\n{short(mistake.cure)}\n```")
    return "\n".join(blocks) + "\n"


def parts() -> dict[str, str]:
    """Return the parts of the page as it is, by title."""
    if not PAGE.exists():
        return {}
    found = re.split(r"(?m)^(?=## )", PAGE.read_text())[1:]
    return {one.partition("\n")[0][3:]: one.strip() + "\n" for one in found}


def check(mistake: Mistake, shown: str) -> None:
    """Compare the page with the shown message, or write the message into the page."""
    there, now = parts(), part(mistake, shown)
    if not WRITE:
        assert there.get(mistake.title, "").strip() == now.strip(), (
            f"docs/errors.md is not current; now it is:\n{now}"
        )
        return
    there[mistake.title] = now
    PAGE.write_text("\n".join([HEAD, *there.values()]))
