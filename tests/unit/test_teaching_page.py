"""docs/teaching.md shows what the catalog says now, and docs/choosing.md its decision tree."""

from __future__ import annotations

import re

from doc_pages import DOCS, generator


def test_its_pictures_are_up_to_date() -> None:
    module = generator("make_diagrams")
    pages = "".join((DOCS / name).read_text("utf-8") for name in ("teaching.md", "choosing.md"))
    shown = re.findall(r"\]\(diagrams/([\w-]+\.svg)\)", pages)
    assert set(shown) == set(module.make_pictures())
    for name, svg in module.make_pictures().items():
        written = (module.FOLDER / name).read_text(encoding="utf-8")
        assert written == svg + "\n", "run python docs/make_diagrams.py"
