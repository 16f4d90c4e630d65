"""docs/teaching.md shows what the catalog says now."""

from __future__ import annotations

import re

from doc_pages import DOCS, generator


def test_its_pictures_are_up_to_date() -> None:
    module = generator("make_diagrams")
    shown = re.findall(r"\]\(diagrams/([\w-]+\.svg)\)", (DOCS / "teaching.md").read_text("utf-8"))
    assert set(shown) == set(module.make_pictures())
    for name, svg in module.make_pictures().items():
        written = (module.FOLDER / name).read_text(encoding="utf-8")
        assert written == svg + "\n", "run python docs/make_diagrams.py"
