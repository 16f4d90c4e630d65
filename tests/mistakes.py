"""Mistakes of users, named: each cell, the code of its error, and what the error advises.

The tables are in `mistakes_of_lines.py`, `mistakes_of_cells.py` and `mistakes_of_keras.py`.
`cluster/test_mistakes.py` makes every mistake on real engines, follows the advice, and compares
`docs/errors.md` with the messages.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))"
GOOD = {
    "model": "model",
    "data": "wb.data.synthetic(64, shape=(4,), classes=2)",
    "loss": "nn.CrossEntropyLoss()",
    "optimizer": "lambda p: torch.optim.SGD(p, 0.1)",
    "batch_size": "8",
    "steps": "2",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the solution that its error names.

    Attributes:
        title: What went wrong, as a user would say it.
        cell: What was typed.
        code: The error's code, empty if there is none; its text is on the page.
        cure: The cell that follows the advice; empty if the advice is not a cell.
        before: A cell that must have run before.
        framework: The framework of the engines.
        where: `line`: refused before an engine was used; `engines`: found on the engines.
        within_s: It is reported in this time.
    """

    title: str
    cell: str
    code: str
    cure: str = ""
    before: str = ""
    framework: str = "torch"
    where: str = "engines"
    within_s: float = 10.0


def fit(strategy: str = "mirrored", before: str = "", **changed: str | None) -> str:
    """Return a cell that calls `wb.fit`; an argument given as None is left out."""
    given = {name: text for name, text in {**GOOD, **changed}.items() if text is not None}
    call = ", ".join(f"{name}={text}" for name, text in given.items())
    lines = ["import torch", "from torch import nn", *([before] if before else [MODEL])]
    return "\n".join([f"%%distributed {strategy} --plot off", *lines, f"wb.fit({call})"])


def own_loop(body: str, strategy: str = "mirrored") -> str:
    """Return a cell with a training loop of the user's own."""
    return "\n".join(
        [
            f"%%distributed {strategy} --plot off",
            "import torch",
            "from torch import nn",
            MODEL,
            "optimizer = torch.optim.SGD(model.parameters(), 0.1)",
            "data = wb.data.synthetic(64, shape=(4,), classes=2)",
            "loader = torch.utils.data.DataLoader(data, batch_size=8)",
            body,
        ]
    )
