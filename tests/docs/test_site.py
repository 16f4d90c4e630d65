"""The site: links to pages, to files beside them and to nowhere; cells as cells; no network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS, REPOSITORY
from needs import need

need("sphinx", "myst_parser")
PAGE = """# A page

[page](other.md) [heading](other.md#a-heading) [README](../README.md) [root](../ROOT.md)
[rules](../CONTRIBUTING.md#house-rules) [file](../LICENSE)

[no page](nothing.md) [no heading](other.md#nothing) [no file](../nothing.py)

```python
%%distributed mirrored --epochs 2  # comment
import torch
```
```{toctree}
other
contributing
```
"""
OTHER = "# Another\n\n## A heading\n\nIt's --plot off.\n"
CONTRIBUTING = "# Contributing\n\n## House rules\n\nSee [the other](docs/other.md).\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Build three pages with the settings of the site; hand out the warnings and the site."""
    root = tmp_path_factory.mktemp("repository")
    docs = root / "docs"
    shutil.copytree(DOCS / "_static", docs / "_static")
    for name in ("conf.py", "contributing.md"):
        shutil.copy(DOCS / name, docs)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, root)
    (root / "ROOT.md").write_text("# A file\n")
    (root / "CONTRIBUTING.md").write_text(CONTRIBUTING)
    (docs / "index.md").write_text(PAGE)
    (docs / "other.md").write_text(OTHER)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-b", "html", str(docs), str(root / "site")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, root / "site"


def links(page: Path) -> dict[str, str]:
    """Return where the links of a page's text lead, by their text."""
    article = re.search(r"<article.*?</article>", page.read_text("utf-8"), re.DOTALL)
    assert article is not None
    found = re.findall(r'<a [^>]*href="([^"]*)"[^>]*>(.*?)</a>', article[0], re.DOTALL)
    return {re.sub(r"<.*?>", "", text): target for target, text in found}


def test_links_lead_to_pages_headings_and_copies_of_files(built: tuple[str, Path]) -> None:
    _, site = built
    found = links(site / "index.html")
    assert found["page"] == "other.html"
    assert found["heading"] == "other.html#a-heading"
    assert found["rules"] == "contributing.html#house-rules"
    assert found["README"] in ("", "#", "index.html")
    for name, text in (("file", "BSD"), ("root", "# A file")):
        assert text in (site / found[name]).read_text("utf-8")


def test_a_page_that_includes_a_file_has_that_file_s_links(built: tuple[str, Path]) -> None:
    assert links(built[1] / "contributing.html")["the other"] == "other.html"


def test_links_that_lead_nowhere_are_warnings_and_nothing_else_is(built: tuple[str, Path]) -> None:
    warnings = re.findall(r"WARNING: (.*)", built[0])
    assert len(warnings) == 3, built[0]
    for word in ("nothing.md", "'nothing'", "../nothing.py"):
        assert any(word in one for one in warnings), word


def test_cells_are_shown_as_cells_and_flags_keep_their_dashes(built: tuple[str, Path]) -> None:
    _, site = built
    page = (site / "index.html").read_text("utf-8")
    assert '<span class="o">%%</span><span class="k">distributed</span>' in page
    assert '<span class="kn">import</span>' in page
    assert "It's --plot off" in (site / "other.html").read_text("utf-8").replace("&#39;", "'")


def test_a_page_needs_no_network(built: tuple[str, Path]) -> None:
    page = (built[1] / "index.html").read_text("utf-8")
    assert re.findall(r'(?:src|href)="((?:https?:)?//[^"]*\.(?:js|css))', page) == []
