"""Several values of one flag: `-n 1,2,4`, `-o bucket_mb=5,25`, `--set lr=0.1,0.01`.

Commas separate values that cannot contain a comma: numbers and words. Options whose text can
contain commas (`split_at=2,5`, the plan of `tensor_parallel`) and texts of `--set` are separated by
`|`: `-o split_at=2,5|3,6`. So lines from older versions keep their meaning.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import PlanError

Scalar = bool | int | float | str
"""The types of `--set` values: `true`, `4`, `0.1` and `adam` get the type that they look like."""


def scalar(text: str) -> Scalar:
    """Return the meaning of a `--set` text as a value."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            return value if math.isfinite(value) else text
    return text


def values(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `--set` by name; several values of one name are separated later."""
    found: dict[str, Any] = dict(given) if isinstance(given, Mapping) else dict(_read_values(given))
    for name, value in found.items():
        is_name = str(name).isidentifier() and not str(name).startswith("_")
        if not (is_name and isinstance(value, (bool, int, float, str))):
            raise PlanError(
                "In --set NAME=VALUE, VALUE must be a number, `true`, `false` or text."
                if is_name
                else "In --set NAME=VALUE, NAME must be a Python name that does not begin with "
                "`_`.",
                seen=f"{name}={value!r}",
                allowed="for example --set lr=0.1, which the cell reads as wb.options.lr",
                code="WB-PLAN-271",
            )
    return found


def written(item: tuple[str, Any]) -> str:
    """Return a value of `--set` as text for a line; text with commas ends in a bar."""
    name, value = item
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{name}={text}|" if "," in text else f"{name}={text}"


def pairs(what: str, example: str) -> Callable[[Iterable[str]], dict[str, str]]:
    """Return a function that reads texts like `bucket_mb=10`, by name.

    Raises:
        PlanError: A text lacks a name or a value.
    """

    def pair(text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise PlanError(
                f"{what} needs a name and a value.", seen=text, allowed=example, code="WB-PLAN-094"
            )
        return key.strip(), value.strip()

    return lambda texts: dict(map(pair, texts))


_read_values = pairs("--set", "--set lr=0.1")


@dataclass(frozen=True)
class Axis:
    """A field for which a line gives several values.

    Attributes:
        field: Of `RunRequest`: `workers`, `batch_size`, `options`, `values`, ...
        values: The field's values.
        key: The name of the option or of the cell's value; empty for other fields.
    """

    field: str
    values: tuple[Any, ...]
    key: str = ""


_MOST_WORD = 24


def _named(key: str, value: object) -> str:
    text = f"{key}={value}"
    return text if len(text) <= _MOST_WORD else f"{text[: _MOST_WORD - 1]}…"


WORDS: dict[str, Callable[[str, Any], str]] = {
    "workers": lambda key, value: "",
    "batch_size": lambda key, value: f"batch{value}",
    "batch_per_worker": lambda key, value: f"each{value}",
    "epochs": lambda key, value: f"epochs{value}",
    "steps": lambda key, value: f"steps{value}",
    "seed": lambda key, value: f"seed{value}",
    "options": _named,
    "values": _named,
    "parameters": _named,
}
"""The part of a run's name for one of several values; the plan already names the workers."""

MOST_RUNS = 120
"""One line starts at most this many runs: a typing mistake could cost a day."""


def several_in(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Axis, ...]]:
    """Return the arguments with one value, and the arguments with a list of values.

    Raises:
        PlanError: A list is empty.
    """
    one, axes = dict(settings), []
    for field in WORDS:
        given = one.get(field)
        named = isinstance(given, Mapping)
        for key, value in dict(given).items() if named else [("", given)]:  # type: ignore[arg-type]
            if not isinstance(value, (list, tuple, range)):
                continue
            if not value:
                raise PlanError(
                    f"`{key or field}` has no value.",
                    seen=value,
                    allowed="one value, or several in a list",
                    code="WB-PLAN-277",
                )
            axes.append(Axis(field, tuple(value), key))
            if named:
                one[field] = {k: v for k, v in one[field].items() if k != key}
            else:
                del one[field]
    return one, tuple(axes)


def check_runs(*counts: int) -> None:
    """Raise PlanError if one line requests too many runs; their number is the product of counts."""
    count = math.prod(counts)
    if count > MOST_RUNS:
        raise PlanError(
            f"One line cannot start more than {MOST_RUNS} runs.",
            seen=" x ".join(str(one) for one in counts if one > 1)
            + (f" = {count} runs" if sum(one > 1 for one in counts) > 1 else " runs"),
            allowed=f"at most {MOST_RUNS} runs",
            next_step="give fewer values, or divide the values among several lines",
            code="WB-PLAN-273",
        )


def each_of(text: str, what: str, *, commas: bool = True) -> list[str]:
    """Return the values in `1,2,4`; if values can contain commas, in `2,5|3,6`.

    Args:
        commas: Whether a comma separates values; if there is a `|`, only the `|` separates.

    Raises:
        PlanError: There is no value, or a value occurs twice.
    """
    mark = "|" if "|" in text or not commas else ","
    found = [part.strip() for part in text.split(mark)]
    found = [part for part in found if part] if mark in text else found
    twice = [part for part in found if found.count(part) > 1]
    if not found or twice:
        raise PlanError(
            f"{what} has no value." if not found else f"{what} has the same value twice.",
            seen=text[:80],
            allowed="one value, or several different values: 1,2,4",
            next_step="to repeat a run, use --seeds K" if twice else None,
            code="WB-PLAN-270",
        )
    return found


def price_of(given: object) -> float:
    """Return a price of a worker-hour.

    Raises:
        PlanError: It is not a number above 0.
    """
    value = float("nan")
    if not isinstance(given, bool):
        with contextlib.suppress(ValueError, TypeError):
            value = float(given)  # type: ignore[arg-type]
    if not 0 < value < math.inf:
        raise PlanError(
            "The price must be a number above 0.",
            seen=given,
            allowed="--price 2.5, in any currency",
            code="WB-PLAN-272",
        )
    return value


_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?$", re.IGNORECASE)


def memory_of(given: object) -> float:
    """Return the bytes in `4GiB`, `800MB`, or a number.

    Raises:
        PlanError: It is not valid, or 0.
    """
    found = _SIZE.match(str(given).strip())
    value = 0.0
    if found is not None and not isinstance(given, bool):
        power = "KMGT".find(found[2].upper()) + 1 if found[2] else 0
        value = float(found[1]) * (1024.0 if found[3] else 1000.0) ** power
    if not value > 0:
        raise PlanError(
            "memory_per_worker is not a valid size.",
            seen=given,
            allowed="4GiB, 800MB, or a number of bytes above 0",
            code="WB-PLAN-313",
        )
    return value


def of_parameters(found: dict[str, Any]) -> list[Axis]:
    """Remove the parameters with several values from the parsed line, and return them."""
    axes = []
    for name, given in list(found.get("parameters", {}).items()):
        parts = each_of(given, f"-p {name}") if given else [given]
        if len(parts) > 1:
            axes.append(Axis("parameters", tuple(parts), name))
            del found["parameters"][name]
    return axes


def of_values(found: dict[str, Any]) -> list[Axis]:
    """Give values of `--set` the types that they look like; remove those with several values."""
    axes = []
    for name, given in list(found.get("values", {}).items()):
        parts = [scalar(part) for part in each_of(given, f"--set {name}")]
        if len(parts) > 1:
            axes.append(Axis("values", tuple(parts), name))
            del found["values"][name]
        else:
            found["values"][name] = parts[0]
    return axes
