"""The panel's sections, in the order in which they are drawn up."""

from __future__ import annotations

from .cluster import ClusterPart
from .part import Part

PARTS: tuple[type[Part], ...] = (ClusterPart,)
