"""What all bands of the picture share: titles, the workers' axis, boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..history.snapshot import Snapshot
from . import text, units
from .theme import HATCHED, INK, MUTED, PAPER, phase_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def style(axes: Axes, title: str, value: str = "") -> None:
    """Give axes a title, and what is said on its right; no frame, no ticks."""
    axes.set_title(title, loc="left", fontsize=9.5, weight="bold", color=INK["any"])
    axes.set_title(value, loc="right", fontsize=9, color=MUTED["any"])
    axes.tick_params(labelsize=8, length=0, colors=MUTED["any"])
    axes.spines[:].set_visible(False)
    axes.set_facecolor(PAPER["any"])
    axes.set_axisbelow(True)


def stack(axes: Axes, at: Any, widths: Any, left: Any, part: str) -> None:
    """Draw one phase's boxes; the waiting ones hatched."""
    color, hatched = phase_colors()[part], part == HATCHED
    axes.barh(
        at,
        widths,
        left=left,
        height=0.8,
        color=(color, 0.22) if hatched else color,
        edgecolor=color if hatched else "white",
        linewidth=0,
        hatch="//////" if hatched else None,
    )


def worker_axis(axes: Axes, snapshot: Snapshot) -> None:
    """Name the workers down the side, the slow one in colour."""
    axes.set_yticks(range(len(snapshot.workers)))
    axes.set_yticklabels([text.worker_label(w) for w in snapshot.workers])
    axes.set_ylim(len(snapshot.workers) - 0.4, -0.6)
    for label, worker in zip(axes.get_yticklabels(), snapshot.workers, strict=True):
        blamed = worker.rank == snapshot.slow_rank
        label.set_color(phase_colors()[HATCHED] if blamed else INK["any"])
        label.set_fontweight("bold" if blamed else "normal")


def draw_percent(axes: Axes, x: float, row: float, share: float, part: str) -> None:
    """Write a share into its box; on a hatched one it stands on a plate."""
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if part == HATCHED else None
    dark = part in (HATCHED, "data_wait_s", "other_s")
    axes.text(
        x, row, units.percent(share), ha="center", va="center", fontsize=8, weight="bold",
        color=INK["light"] if dark else "white", bbox=plate,
    )  # fmt: skip
