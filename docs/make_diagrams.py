"""Writes the pictures of docs/teaching.md from the catalog.

python docs/make_diagrams.py
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "diagrams"


def make_pictures() -> dict[str, str]:
    """Return the pictures as SVG, by file name."""
    from workbench.notebook.compare import diagram

    return {
        "mirrored-ring.svg": diagram("mirrored", 4, allreduce="ring").svg(),
        "parameter-server.svg": diagram("parameter_server", 3, servers=2).svg(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in make_pictures().items():
        (FOLDER / name).write_text(svg + "\n", encoding="utf-8")
