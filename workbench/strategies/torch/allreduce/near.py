"""Connects the workers of one host by sockets of their own (`engine/links/peers.py`).

Gloo's messages pass through a thread of its own in each worker, which costs a wake-up or two per
message; on one host a worker can read and write its messages itself. All workers take the same
way: where one of them cannot be reached like that, everybody stays with gloo.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

import torch
import torch.distributed as dist

from ....engine.links.address import host_token
from ....engine.links.peers import Doorway, Peers
from ....engine.links.wire import LinkError
from ....engine.marks import ALL_REDUCE, waits_in

_CARD_BYTES = 1024


@waits_in(ALL_REDUCE)
def connect_near(group: Any) -> Peers | None:
    """Connect all workers of a gloo group, who call this together.

    Returns:
        None where they are not all on one host, or cannot see each other's sockets.
    """
    if group.size() == 1:
        return None
    doorway = peers = None
    try:
        with contextlib.suppress(OSError):
            doorway = Doorway()
        cards = _swap_cards(group, "" if doorway is None else doorway.path)
        same_host = len({card["host"] for card in cards}) == 1
        if not same_host or not all(card["path"] for card in cards):
            return None
        if doorway is not None:
            paths, key = [card["path"] for card in cards], bytes.fromhex(cards[0]["key"])
            with contextlib.suppress(OSError, LinkError):
                peers = doorway.connect(paths, group.rank(), key)
    finally:
        if doorway is not None:
            doorway.close()
    everybody = torch.tensor([peers is not None], dtype=torch.int32)
    dist.all_reduce(everybody, dist.ReduceOp.MIN, group=group)
    if not everybody and peers is not None:
        peers.close()
    return peers if everybody else None


def _swap_cards(group: Any, path: str) -> list[dict[str, str]]:
    """Return each worker's host, path and proposed key, by rank; rank 0's key will be used."""
    card = {"host": host_token(), "path": path, "key": secrets.token_hex(32)}
    text = json.dumps(card).encode().ljust(_CARD_BYTES)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return [json.loads(bytes(other.tolist())) for other in every]
