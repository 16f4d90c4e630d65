"""How one field of a request is written: on the line, in `cluster.run(...)`, in the docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import PlanError

Read = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Flag:
    """How one field of a request is written.

    Attributes:
        names: `-n`, `--workers`; the last one is its long name. A word without dashes is a
            position on the line.
        help: What it does, in a few words.
        without: The behaviour if it is not given, in words.
        example: A line that uses it.
        metavar: The name of its value; empty: it has no value, it is a switch.
        choices: The allowed values, if there are only a few words.
        repeated: Whether it can be given several times.
        read: The function that turns the text (or the list of texts, if repeated) into the value.
        write: The function that turns the value, or each of its parts, into text.
        argument: Its name in `cluster.run(...)`; empty: none.
        is_text: Whether Python code also gives it as text, such as `"10:15"`. trains: Whether it
            belongs to a training run, so that a plain cell refuses it. overrides: Whether it
            overrides an argument that the cell passes to `wb.fit`. several: Whether it can have
            several values with commas, with one run for each.
    """

    names: tuple[str, ...]
    help: str
    without: str
    example: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    repeated: bool = False
    read: Read = _same
    write: Read = str
    argument: str = ""
    is_text: bool = False
    trains: bool = False
    overrides: bool = False
    several: bool = False

    @property
    def long(self) -> str:
        """Its name in messages: `--workers`."""
        return self.names[-1]

    @property
    def option(self) -> dict[str, Any]:
        """The arguments for `ArgumentParser.add_argument` in addition to the names."""
        if not self.long.startswith("-"):
            return {"nargs": "?", "default": "", "help": self.help}
        if not self.metavar and not self.choices:
            return {"action": "store_true", "help": self.help}
        given: dict[str, Any] = {"help": self.help, "default": None}
        if self.repeated:
            given |= {"action": "append", "default": []}
        return given | ({"choices": self.choices} if self.choices else {"metavar": self.metavar})

    def words(self, value: Any) -> list[tuple[str, str]]:
        """Return the flag and its text, once for each part of a repeated one."""
        parts = value.items() if isinstance(value, dict) else value if self.repeated else [value]
        return [(self.long, self.write(part)) for part in parts]

    def given(self, value: Any) -> Any:
        """Return the field's value from an argument in Python code.

        Raises:
            PlanError: It is not one of the choices, or its text is not valid.
        """
        if self.choices and value not in self.choices:
            raise PlanError(
                f"This is not an allowed value of {self.argument}.",
                seen=value,
                allowed=", ".join(self.choices),
                code="WB-PLAN-093",
            )
        if self.repeated and self.is_text:
            return self.read([value] if isinstance(value, str) else list(value))
        return self.read(value) if self.is_text and isinstance(value, str) else value


def said(names: str, default: Any = None, **about: Any) -> Any:
    """Return a field that a flag gives."""
    flag = Flag(tuple(names.split()), **about)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata={"flag": flag})
    return dataclasses.field(default=default, metadata={"flag": flag})
