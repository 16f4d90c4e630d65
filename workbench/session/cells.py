"""Text into the notebook: a new cell below the one that is running."""

from __future__ import annotations

from typing import Any


def to_a_cell(text: str) -> bool:
    """Put text into a new cell below the one that is running; it is not run.

    Only the reply to a cell carries it, so nothing can be put there by a button's callback: the
    panel then shows the text with a button that copies it.

    Returns:
        Whether the notebook was told; else nobody will see the text unless it is shown.
    """
    from IPython import get_ipython

    shell: Any = get_ipython()
    if shell is None or not _in_a_cell(shell):
        return False
    shell.set_next_input(text, replace=False)
    return True


def _in_a_cell(shell: Any) -> bool:
    """Whether a cell is being run, not a message of a widget."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:  # a terminal, which shows the text at its next prompt
        return True
    parent = kernel.get_parent() or {}
    kind = parent.get("header", {}).get("msg_type", "")
    return bool(kind == "execute_request")
