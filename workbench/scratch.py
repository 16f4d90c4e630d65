"""Which cluster a process belongs to, and where it puts files that go with the cluster."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "WORKBENCH_CLUSTER"
"""Environment variable of every process of a cluster: the cluster's folder."""
TMP = "tmp"


def folder() -> str | None:
    """Return where temporary files of ours go; None (the system's place) outside a cluster.

    What is there goes with the cluster, also when this process is killed.
    """
    path = Path(os.environ.get(MARK) or "/nowhere") / TMP
    return str(path) if path.is_dir() else None
