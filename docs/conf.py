"""How the pages of this folder become a site: `python -m sphinx -W -b html docs docs/_build`.

The pages are plain Markdown that GitHub shows as well, so this file does what their plainness asks
for: cells of a notebook are highlighted as such, and links to files of the repository work.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, ClassVar

from pygments.lexer import bygroups, inherit
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Operator, Text
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
ON_THE_SITE = {"README.md": "index", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}
"""Files beside this folder that have a page here."""

project = "Workbench"
author = "the Workbench contributors"
project_copyright = author
version = release = re.findall(
    r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE
)[0]

sys.path.insert(0, str(REPOSITORY))  # the API pages show the docstrings of this checkout

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries have no page here
default_role = "literal"  # docstrings write names in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "none"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
highlight_language = "none"
smartquotes = False  # it would make dashes of flags

html_theme = "furo"
html_title = "Workbench"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


class CellLexer(PythonLexer):
    """Python as a notebook's cells have it: with magics and shell commands."""

    name = "a notebook's cell"
    aliases: ClassVar[list[str]] = ["cell"]
    tokens: ClassVar[dict[str, list[Any]]] = {
        "root": [
            (r"^(\s*)(%%?)(\w+)(.*?)(#.*)?$", bygroups(Text, Operator, Keyword, Name, Comment)),
            (r"^(\s*)(!)(.*)$", bygroups(Text, Operator, Name)),
            inherit,
        ]
    }


class RepositoryLinks(SphinxTransform):
    """Links to files beside this folder lead to their page here, or to a copy of the file."""

    default_priority = 5

    def apply(self, **rest: Any) -> None:
        """Replace them; what leads to no file is left, and Sphinx complains about it."""
        included = self.env.docname in ON_THE_SITE.values() and self.env.docname != "index"
        folder = REPOSITORY if included else (DOCS / self.env.docname).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            target, _, anchor = str(link["reftarget"]).partition("#")
            path = (folder / target).resolve()
            if link.get("refdomain") == "doc" and not path.is_file():
                path = path.with_name(path.name + ".md")  # the parser takes pages' suffixes away
            if REPOSITORY in path.parents and path.is_file():
                self._lead(link, path.relative_to(REPOSITORY), anchor)

    def _lead(self, link: addnodes.pending_xref, path: Path, anchor: str) -> None:
        page = ON_THE_SITE.get(path.as_posix())
        if path.parts[0] == "docs" and path.suffix == ".md":
            page = path.relative_to("docs").with_suffix("").as_posix()
        if page:
            link["refdomain"], link["reftarget"] = "doc", page
            link["reftargetid"] = anchor or link.get("reftargetid")
            return
        target = "/" + Path("..", path).as_posix()
        copy = addnodes.download_reference(
            "", "", *link.children, refdoc=self.env.docname, reftarget=target, refexplicit=True
        )
        link.replace_self(copy)


SECTION = re.compile(r"^(Args|Attributes|Example|Examples|Note|Raises|Returns|Yields):$")


def show_diagrams(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Have indented blocks before a docstring's sections shown as they are: diagrams, examples."""
    end = next((at for at, line in enumerate(lines) if SECTION.match(line)), len(lines))
    shown: list[str] = []
    for at, line in enumerate(lines[:end]):
        begins = line.startswith("    ") and at > 0 and not lines[at - 1].strip()
        within = next((one for one in reversed(lines[:at]) if one.strip()), "").startswith("    ")
        if begins and not within:
            shown += ["::", ""]
        shown.append(line)
    lines[:end] = shown


def name_functions(*about: Any) -> tuple[str, str] | None:
    """Have a default that is a function shown by its name, not by its address."""
    signature, returned = about[-2:]
    if not signature:
        return None
    return re.sub(r"<function (\w+) at \w+>", r"\1", signature), returned


def setup(app: Sphinx) -> None:
    """Add what is above."""
    app.connect("autodoc-process-signature", name_functions)
    app.connect("autodoc-process-docstring", show_diagrams, priority=400)  # before napoleon
    for name in ("python", "python3"):  # what releases of Sphinx call it
        app.add_lexer(name, CellLexer)
    app.add_transform(RepositoryLinks)
