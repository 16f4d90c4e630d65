"""What travels of tables of which a step uses a few rows: the messages, and who knows what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from workbench.errors import FitError  # noqa: E402
from workbench.strategies.torch.servers.rows import (  # noqa: E402
    Changes,
    Parted,
    check_row_wise,
    counts_of,
    norm_of,
    put,
    rows_of,
    sparse_of,
    summed,
    tables_of,
)
from workbench.strategies.torch.servers.shards import as_bytes, divide  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TENSORS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def parted(shape: tuple[int, ...] = (5, 2), dtype: Any = torch.float32) -> Parted:
    (shard,) = divide([torch.zeros(3), torch.zeros(shape, dtype=dtype)], 1)
    return Parted(shard, {1})


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.randoms(use_true_random=False))
def test_what_is_sent_is_what_is_read_whatever_the_shapes_and_types(
    made: list[tuple[tuple[int, ...], Any, bool]], random: Any
) -> None:
    tensors = [torch.rand(shape).to(dtype) for shape, dtype, _ in made]
    tables = {i for i, (_, _, travels_as_rows) in enumerate(made) if travels_as_rows}
    (shard,) = divide(tensors, 1)
    of = Parted(shard, tables)
    assert {piece.index for piece in of.tables} == tables
    chosen = {
        i: torch.tensor(sorted(random.sample(range(len(tensors[i])), random.randint(0, 1))))
        for i in tables
    }
    rows = [(chosen[p.index].long(), tensors[p.index][chosen[p.index].long()]) for p in of.tables]
    parts = of.parts([as_bytes(tensors[piece.index]) for piece in of.whole.pieces], rows)
    memory = np.concatenate([*parts, np.zeros(8, np.uint8)])  # a mailbox may be larger
    assert memory.size - 8 <= of.most_bytes
    for (indices, values), (sent_indices, sent_values) in zip(
        of.read(memory, counts_of(rows)), rows, strict=True
    ):
        assert indices.tolist() == sent_indices.tolist()
        assert values.dtype == sent_values.dtype
        assert torch.equal(values, sent_values)
    for piece, view in zip(of.whole.pieces, of.whole.views(memory), strict=True):
        assert torch.equal(view, tensors[piece.index])
    room = of.room(counts_of(rows))
    at = 0
    for part in of.parts([np.empty(p.size_bytes, np.uint8) for p in of.whole.pieces], room):
        part[:] = memory[at : at + part.size]
        at += part.size
    for came, sent in zip(room, rows, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(came, sent, strict=True))


@pytest.mark.parametrize("counts", [[], [6], [1, 1], [-1]])
def test_rows_that_cannot_be_in_a_message_are_refused(counts: list[int]) -> None:
    of = parted()
    with pytest.raises((ValueError, RuntimeError)):
        of.read(np.zeros(of.most_bytes, np.uint8), counts)


def test_rows_that_the_table_does_not_have_are_refused() -> None:
    for index in (5, -1):
        with pytest.raises(RuntimeError):
            sparse_of((torch.tensor([index]), torch.ones(1, 2)), torch.zeros(5, 2))


def test_each_worker_is_told_of_a_changed_row_once_and_only_then() -> None:
    of, table = parted(), torch.arange(10.0).view(5, 2)
    changes = Changes(of, (0, 1))
    assert counts_of(changes.take(0, [table])) == [5]  # at first all rows are new
    changes.note({1: sparse_of((torch.tensor([4, 2]), torch.ones(2, 2)), table)})
    changes.note({1: sparse_of((torch.tensor([2]), torch.ones(1, 2)), table)})
    changes.note({1: None})
    ((indices, values),) = changes.take(0, [table])
    assert indices.tolist() == [2, 4]
    assert torch.equal(values, table[[2, 4]])
    assert counts_of(changes.take(0, [table])) == [0]
    assert counts_of(changes.take(1, [table])) == [5]
    changes.everything()
    assert counts_of(changes.take(0, [table])) == [5]


def test_a_worker_that_does_not_ask_costs_no_more_than_its_tables() -> None:
    of, table = parted(), torch.zeros(5, 2)
    changes = Changes(of, (0, 1))
    for _ in range(100):
        changes.note({1: sparse_of((torch.tensor([1, 3]), torch.ones(2, 2)), table)})
        assert all(sum(map(len, pending[0])) <= 10 for pending in changes._of.values())
    assert counts_of(changes.take(1, [table])) == [5]


def test_rows_are_put_where_they_belong_and_nowhere_else() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 2))
    put(table, (torch.tensor([3, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    assert table.tolist() == [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]


def test_a_gradients_rows_are_there_once_and_a_dense_one_has_all() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 2))
    twice = torch.sparse_coo_tensor([[2, 2, 0]], torch.ones(3, 2), (4, 2), check_invariants=True)
    indices, values = rows_of(twice, table)
    assert (indices.tolist(), values.tolist()) == ([0, 2], [[1.0, 1.0], [2.0, 2.0]])
    assert rows_of(torch.ones(4, 2), table)[0].tolist() == [0, 1, 2, 3]
    assert counts_of([rows_of(None, table)]) == [0]


def test_gradients_of_several_workers_are_added_up_row_by_row() -> None:
    table = torch.zeros(4, 2)
    one = sparse_of((torch.tensor([0, 2]), torch.ones(2, 2)), table)
    other = sparse_of((torch.tensor([2, 3]), torch.full((2, 2), 2.0)), table)
    added = summed([one, other], table)
    assert torch.equal(added.to_dense(), one.to_dense() + other.to_dense())
    assert norm_of([added, torch.tensor([1.0])]) == pytest.approx((2 + 18 + 8 + 1) ** 0.5)


def test_tables_are_the_parameters_of_layers_made_with_sparse() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(3, 2, sparse=True), torch.nn.EmbeddingBag(3, 2, sparse=True),
        torch.nn.Embedding(3, 2), torch.nn.Linear(2, 1),
    )  # fmt: skip
    assert tables_of(model) == {model[0].weight, model[1].weight}
    model[0].weight.requires_grad_(False)
    assert tables_of(model) == {model[1].weight}


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), False),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), True),
        (lambda p: torch.optim.Adagrad(p, 0.1), False),
        (lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1), True),
        (lambda p: torch.optim.SparseAdam(p), False),
        (lambda p: torch.optim.Adam(p), True),
    ],
)
def test_an_optimizer_that_changes_other_rows_is_refused(make: Any, refused: bool) -> None:
    table = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = make([table])
    check_row_wise(optimizer, set())  # no table, no limit
    if refused:
        with pytest.raises(FitError, match="WB-FIT-185"):
            check_row_wise(optimizer, {table})
    else:
        check_row_wise(optimizer, {table})
