"""The panel's sections, in the order in which they are drawn up."""

from __future__ import annotations

from .cluster import ClusterPart
from .faults import FaultsPart
from .live import LivePart
from .part import Part

PARTS: tuple[type[Part], ...] = (ClusterPart, LivePart, FaultsPart)
