"""Numbers as all views write them, with their units."""

from __future__ import annotations

import math

UNKNOWN = "–"
"""Shown for what was not or cannot be measured; never 0."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Return a number in three significant digits, with k, M, G beyond a thousand."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    for limit, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k")):
        if size >= limit * 0.9995:
            return _digits(value / scale) + suffix
    if size != 0 and size < 1e-3:
        return f"{value:.2e}"
    return _digits(value)


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95 or value == int(value):
        return f"{value:.0f}"
    if size >= 1:
        return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a span of time: `340 ms`, `12.3 s`, `4:05`, `1:02:03`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return milliseconds(seconds * 1e3)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def milliseconds(value: float) -> str:
    """Return milliseconds in a width that suits their size: `0.42 ms`, `4.2 ms`, `48 ms`."""
    if not math.isfinite(value):
        return UNKNOWN
    places = 0 if abs(value) >= 9.95 or value == 0 else 1 if abs(value) >= 0.995 else 2
    return f"{value:.{places}f} ms"


def percent(fraction: float) -> str:
    """Return a fraction as whole percent."""
    return f"{fraction * 100:.0f} %" if math.isfinite(fraction) else UNKNOWN


def size(value: float | None) -> str:
    """Return bytes in binary units: `512 B`, `1.5 MiB`; a dash where not measured."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 1023.5 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    places = 1 if power and abs(value) < 99.5 else 0
    return f"{value:.{places}f} {_UNITS[power]}"
