"""`workbench ps` and `workbench stop`: the clusters of this user on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from .cluster import kept
from .errors import ClusterError
from .session.keeping import words

NOBODY = "nobody"


def add_commands(commands: Any) -> None:
    """Add our commands to the command line."""
    listing = commands.add_parser("ps", help="list the clusters of yours on this machine")
    listing.add_argument("--json", action="store_true", help="for programs")
    stop = commands.add_parser("stop", help="end clusters, whoever owns them")
    stop.add_argument("id", nargs="*", metavar="ID", help="as workbench ps lists them")
    stop.add_argument("--all", action="store_true", help="all of yours on this machine")


def run(given: argparse.Namespace) -> int:
    """Run one of our commands; return its exit status.

    Raises:
        ClusterError: There is no such cluster.
    """
    if given.command == "ps":
        found = [describe(one) for one in kept.clusters()]
        print(json.dumps(found, indent=1) if given.json else table(found))
        return 0
    return _stop(given.id, everything=given.all)


def describe(found: kept.Found) -> dict[str, Any]:
    """Return one cluster as `--json` shows it; times in seconds."""
    about, owner = found.about, found.owner
    return {
        "id": found.id,
        "since_s": float(about["since"]),
        "age_s": max(0.0, time.time() - float(about["since"])),
        "engines": len(found.engines),
        "framework": about.get("framework", ""),
        "running": found.busy,
        "kept": found.kept,
        "owner_pid": None if owner is None else int(owner["pid"]),
        "notebook": about.get("notebook") or about.get("cwd", ""),
        "idle_s": found.idle_s,
        "idle_timeout_s": about.get("idle_timeout_s") or None,
    }


COLUMNS = ("id", "since", "engines", "framework", "running", "owner", "idle for", "notebook")


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the clusters as a table, a line each."""
    if not found:
        return "no clusters"
    lines = [COLUMNS, *(_row(one) for one in found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join(padded)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    owner = f"pid {one['owner_pid']}" if one["owner_pid"] is not None else NOBODY
    return (
        one["id"],
        time.strftime("%m-%d %H:%M", time.localtime(one["since_s"])),
        str(one["engines"]),
        one["framework"],
        one["running"] or "-",
        f"{owner}, kept" if one["kept"] else owner,
        words(one["idle_s"]) if one["idle_s"] >= 1 else "-",
        one["notebook"] or "-",
    )


def _stop(ids: Sequence[str], *, everything: bool) -> int:
    found = {one.id: one for one in kept.clusters()}
    unknown = [name for name in ids if name not in found]
    if unknown or bool(ids) == everything:
        raise ClusterError(
            "There is no such cluster." if unknown else "Which cluster is to end?",
            seen=", ".join(unknown) or None,
            allowed=", ".join(found) or "none: there is no cluster",
            next_step="workbench ps lists them; workbench stop --all ends all of yours",
            code="WB-CLUSTER-002",
        )
    left = []
    for one in found.values():
        if everything or one.id in ids:
            gone = kept.stop(one)
            left += [] if gone else [one.id]
            print(f"{one.id} {'stopped' if gone else 'is still there'}")
    if left:
        print(f"not all processes ended: {', '.join(left)}", file=sys.stderr)
    return 1 if left else 0
