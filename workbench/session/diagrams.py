"""`wb.diagram`: who sends what to whom in a step of a strategy, as a picture and as data."""

from __future__ import annotations

from typing import Any

from ..catalog.messages import messages
from ..views.diagram import DiagramPicture


def diagram(
    strategy: str, workers: int = 4, *, framework: str = "torch", **options: Any
) -> DiagramPicture:
    """Return the messages of one step: `wb.diagram("parameter_server", workers=3, servers=2)`.

    Args:
        strategy: A name or alias, as `%%distributed` takes it.
        workers: How many, 1 to 64; a strategy with a lower limit takes fewer.
        options: The strategy's, as `-o` takes them.

    Returns:
        A picture (SVG, with its content as text); `.data` are nodes, phases and arrows,
        `.to_wire()` the same for JSON.

    Raises:
        PlanError: The strategy or an option is unknown, or the options do not fit the workers.
    """
    return DiagramPicture(messages(strategy, workers, options, framework=framework))
