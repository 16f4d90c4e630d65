"""What the lines of all magics are made of: words, whole numbers, ranks, a comment at the end."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from .errors import PlanError


class Parser(argparse.ArgumentParser):
    """Raises PlanError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        flag = re.search(r"unrecognized arguments: (.*)", message)
        if flag:
            raise PlanError(
                f"{self.prog} does not know that.",
                seen=flag[1],
                allowed=self.format_usage().replace("usage: ", "").strip(),
                next_step=f"{self.prog}? shows the help",
                code="WB-PLAN-155",
            )
        raise PlanError(
            f"{self.prog}: {message}.", next_step=f"{self.prog}? shows the help", code="WB-PLAN-156"
        )


def tokens(line: str) -> Sequence[str]:
    """Split a line into words as a shell does, its comment left out.

    Raises:
        PlanError: A quotation mark is missing.
    """
    try:
        return shlex.split(strip_comment(line))
    except ValueError as error:
        raise PlanError(
            "The line was not understood.", seen=line, allowed=str(error), code="WB-PLAN-157"
        ) from None


def strip_comment(line: str) -> str:
    """Return the line without a trailing `# ...`, which must follow a space or begin the line."""
    quoted = ""
    for at, char in enumerate(line):
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line.rstrip()


def whole_number(what: str, text: str, least: int = 1) -> int:
    """Read a number that counts something.

    Raises:
        PlanError: It is none, or too small.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        allowed = f"a whole number, at least {least}"
        raise PlanError(
            f"{what} must count something.", seen=_short(text), allowed=allowed, code="WB-PLAN-158"
        )
    return int(text)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read `0,2`, `0-2` or `[0,2]`.

    Raises:
        PlanError: It has none of these forms.
    """
    found: list[int] = []
    for part in text.strip().strip("[]").split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", part)
        if not match:
            raise PlanError(
                "Ranks were not understood.",
                seen=_short(text),
                allowed="0,2 or 0-2 or [0,2], with numbers up to 9999",
                code="WB-PLAN-159",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError(
                "A range of ranks goes upwards.",
                seen=part.strip(),
                allowed="0-2",
                code="WB-PLAN-160",
            )
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
