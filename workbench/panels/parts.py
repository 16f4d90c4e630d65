"""The panel's sections, in the order in which they are drawn up."""

from __future__ import annotations

from .cluster import ClusterPart
from .comparison import ComparisonPart
from .faults import FaultsPart
from .live import LivePart
from .part import Part
from .queue import QueuePart
from .recipe import RecipePart
from .strategies import StrategiesPart
from .teaching import TeachingPart

PARTS: tuple[type[Part], ...] = (
    ClusterPart,
    RecipePart,
    StrategiesPart,
    QueuePart,
    LivePart,
    FaultsPart,
    ComparisonPart,
    TeachingPart,
)
