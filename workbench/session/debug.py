"""`%cluster debug`: a paused rank, a failed one, or debugpy for VS Code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ClusterError
from ..messages import Served
from ..views.blocks import show
from . import prompt
from .paused import Paused
from .postmortem import PostMortem, converse, failed_engine
from .prompt import Prompt, say

if TYPE_CHECKING:
    from ..cluster_line import ClusterLine
    from .access import ClusterAccess

SERVE = "workbench.engine.debugpy_server:serve"


def debug(cluster: ClusterAccess, asked: ClusterLine) -> None:
    """Do what a `%cluster debug` line asks for."""
    if asked.port is not None:
        for offset, rank in enumerate(asked.ranks or cluster.worker_ids[:1]):
            port = asked.port + offset if asked.port else 0
            say(serve(cluster, rank, port) + "\n")
        return
    paused = cluster.paused
    engine = asked.ranks[0] if asked.ranks else next(iter(paused.stops), None)
    if engine is not None and (engine in paused.stops or cluster.is_busy):
        check_living(cluster, engine)
        if engine in paused.stops or paused.inquire(engine) is not None:
            _paused(paused, engine, asked.commands)
            return
    found = post_mortem(cluster, engine)
    if asked.commands:
        for line in asked.commands:
            say(found.command(line))
    elif prompt.can_prompt():
        converse(found, input, say)
    else:
        show(found)


def post_mortem(cluster: ClusterAccess, engine: int | None) -> PostMortem:
    """Return the post-mortem of a rank, by default of the one that failed first.

    Raises:
        RunError: It has not failed, or a cell is going on.
        ClusterError: The engine is gone.
    """
    cluster.claim()
    if engine is None:
        engine = failed_engine(cluster.last_task)
    check_living(cluster, engine)
    return PostMortem(cluster.engine_set, engine)


def check_living(cluster: ClusterAccess, engine: int) -> None:
    """Raise ClusterError where an engine is dead, or never was."""
    info = cluster.engine_set.known(engine)
    if info.state == "dead":
        raise ClusterError(
            f"Engine {engine} is gone ({info.exit}), and its frames with it.",
            allowed=", ".join(map(str, cluster.ids)),
            next_step=f"%cluster logs {engine} shows its last words",
            code="WB-CLUSTER-037",
        )


def _paused(paused: Paused, engine: int, commands: Sequence[str]) -> None:
    if commands:
        for line in commands:
            say(paused.tell(engine, line).text)
    elif prompt.can_prompt():
        Prompt(paused).converse(engine)
    else:
        stop = paused.stops[engine]
        say(
            f"rank {engine} is paused at {stop.where}\n{stop.text}"
            f"This front end has no prompt; %cluster debug {engine} -c 'p x' -c c gives commands.\n"
        )


def serve(cluster: ClusterAccess, engine: int, port: int) -> str:
    """Have debugpy listen in an engine; return how to attach.

    Raises:
        ClusterError: debugpy is missing there, or the port is taken.
    """
    check_living(cluster, engine)
    if cluster.is_busy:
        found = cluster.paused.serve(engine, port)
    else:
        answer = cluster.engine_set.call([engine], SERVE, (port,))[engine]
        found = Served(engine=engine, **answer)
    if found.missing is not None:
        raise ClusterError(
            "debugpy is not installed where the engines run.",
            seen=found.missing,
            next_step="pip install 'distributed-workbench[debug]', then %cluster restart",
            code="WB-CLUSTER-038",
        )
    if found.port is None:
        raise ClusterError(
            f"debugpy cannot listen on 127.0.0.1:{port}.",
            seen=found.taken,
            allowed="a free port; 0 takes any",
            next_step=f"%cluster debug {engine} --port {port + 1 if port else 0}",
            code="WB-CLUSTER-039",
        )
    host = cluster.engine_set.known(engine).host
    return attach_words(engine, found.port, host, before=found.before)


def attach_words(engine: int, port: int, host: str, *, before: bool) -> str:
    """Return how to attach VS Code to an engine."""
    entry = {
        "name": f"Workbench rank {engine}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "justMyCode": False,
    }
    state = "listens already" if before else "listens"
    return (
        f"rank {engine}: debugpy {state} on 127.0.0.1:{port} of {host}, until the engine ends.\n"
        f"VS Code, launch.json:\n{json.dumps(entry, indent=2)}\n"
        f"From another machine: ssh -L {port}:127.0.0.1:{port} {host}\n"
        "breakpoint() stops in VS Code while it is attached. debugpy asks for no password: whoever "
        "has an account on this machine can attach."
    )
