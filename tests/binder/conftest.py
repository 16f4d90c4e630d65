"""The modules of binder/ can be imported as its check does it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "binder"))
