"""Scaling as text for other tools: CSV, Markdown, HTML, and files by their suffix."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import PlanError
from ...history.analysis.scaling.curves import FIELDS, records
from ...shared.cluster_env import export
from ..comparison.exports import PAGE, csv_cell, markdown_of
from .picture import scaling_png, scaling_svg
from .table import scaling_table

if TYPE_CHECKING:
    import pandas as pd

    from ...history.analysis.scaling.curves import Scaling
    from .published import Published

_WORDS = {"curve", "strategy", "framework", "scaling", "state", "seeds", "law", "workers", "steps",
          "base_workers", "predicted_from"}  # fmt: skip


def csv_of(scaling: Scaling) -> str:
    """Return a line per plan and number of workers: plain numbers, empty where not measured."""
    target = io.StringIO()
    writer = csv.DictWriter(target, [one.key for one in FIELDS], lineterminator="\n")
    writer.writeheader()
    for record in records(scaling):
        writer.writerow({key: csv_cell(value) for key, value in record.items()})
    return target.getvalue()


def frame_of(scaling: Scaling) -> pd.DataFrame:
    """Return the table of `csv_of` as a DataFrame; NaN where not measured."""
    import pandas as pd

    made = pd.DataFrame(records(scaling))
    return made.astype({key: float for key in made.columns if key not in _WORDS})


def page_of(scaling: Scaling, published: Sequence[Published] = ()) -> str:
    """Return a complete page with the table and the picture, which loads nothing from the net."""
    names = ", ".join(curve.name for curve in scaling.curves)
    return PAGE.format(
        title=html.escape(f"Scaling: {names}", quote=True),
        table=scaling_table(scaling).html(),
        picture=base64.b64encode(scaling_svg(scaling, published)).decode(),
    )


def save(scaling: Scaling, path: str | Path, published: Sequence[Published] = ()) -> Path:
    """Write scaling to a file, in the form of its suffix; return its path.

    Raises:
        PlanError: There is no form for this suffix.
        RunError: The file cannot be written.
    """
    target = Path(path).expanduser()
    return export(target, as_bytes(scaling, target.suffix.lower() or str(path), published))


def as_bytes(scaling: Scaling, suffix: str, published: Sequence[Published] = ()) -> bytes:
    """Return the contents of a file with this suffix (`.csv`).

    Raises:
        PlanError: There is no form for this suffix.
    """
    make = _FORMS.get(suffix)
    if make is None:
        raise PlanError(
            "The scaling results cannot be saved in a file with this suffix.",
            seen=suffix,
            allowed=", ".join(_FORMS),
            code="WB-PLAN-279",
        )
    made = make(scaling, published)
    return made if isinstance(made, bytes) else made.encode()


_FORMS: dict[str, Callable[[Scaling, Sequence[Published]], str | bytes]] = {
    ".csv": lambda scaling, published: csv_of(scaling),
    ".md": lambda scaling, published: markdown_of(scaling_table(scaling)),
    ".html": page_of,
    ".json": lambda scaling, published: json.dumps(scaling.to_wire(), allow_nan=False) + "\n",
    ".png": lambda scaling, published: scaling_png(scaling, published=published),
    ".svg": scaling_svg,
}
"""The function that saves scaling under each suffix."""
