"""docs/teaching.md shows what the catalog says now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_its_pictures_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_diagrams", DOCS / "make_diagrams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shown = re.findall(r"\]\(diagrams/([\w-]+\.svg)\)", (DOCS / "teaching.md").read_text("utf-8"))
    assert set(shown) == set(module.make_pictures())
    for name, svg in module.make_pictures().items():
        written = (module.FOLDER / name).read_text(encoding="utf-8")
        assert written == svg + "\n", "run python docs/make_diagrams.py"
