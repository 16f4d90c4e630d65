"""Engines are called by the part they take in a cell or run."""

import json

import pytest

from workbench.shared.members import Member, called, ranges

RANKS = [Member.of_ranks(rank) for rank in range(6)]
REPLICAS = Member.of_ranks(0, 3, "cuda:0")
SERVER = Member.helper("server s0")


@pytest.mark.parametrize(
    ("member", "role", "text", "title", "heading", "verb"),
    [
        (Member.of_ranks(1, device="cpu"), "worker", "rank 1", "Rank 1", "rank 1 · cpu", "is"),
        (
            Member("worker", 1, 1, device="cpu", host="xh1"),
            *("worker", "rank 1", "Rank 1", "rank 1 · xh1 · cpu", "is"),
        ),
        (Member.of_ranks(2, 2), "worker", "rank 2", "Rank 2", "rank 2", "is"),
        (REPLICAS, "replicas", "replicas 0-3", "Replicas 0-3", "replicas 0-3 · cuda:0", "are"),
        (SERVER, "helper", "server s0", "Server s0", "server s0", "is"),
    ],
)
def test_a_member_is_called_by_its_part(member, role, text, title, heading, verb):
    assert (member.role, str(member)) == (role, text)
    assert (member.title, member.heading, member.verb) == (title, heading, verb)
    assert Member.from_wire(json.loads(json.dumps(member.to_wire()))) == member


def test_several_are_called_by_their_ranks_where_all_have_one():
    assert called(RANKS[1:2]) == "rank 1"
    assert called([RANKS[0], RANKS[2], RANKS[3]]) == "ranks 0, 2-3"
    assert called([RANKS[0], SERVER]) == "rank 0, server s0"
    assert called([Member.helper("rank 7")]) == "rank 7"
    assert called([Member.helper("rank 7"), RANKS[0]]) == "rank 7, rank 0"
    assert ranges([5, 1, 2, 3]) == "1-3, 5"
