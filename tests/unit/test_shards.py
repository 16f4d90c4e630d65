"""Which server holds which parameters, and where in its memory."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from workbench.errors import FitError  # noqa: E402
from workbench.strategies.torch.servers.shards import (  # noqa: E402  # noqa: E402  # noqa: E402  # noqa: E402
    Shard,
    as_bytes,
    divide,
    importable,
    plain,
    restored,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.lists(
    st.builds(lambda shape, dtype: torch.rand(shape).to(dtype), SHAPES, st.sampled_from(DTYPES)),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(deadline=None)
@given(TENSORS, st.integers(1, 5))
def test_every_tensor_has_one_aligned_place_on_one_server(
    tensors: list[torch.Tensor], servers: int
) -> None:
    servers = min(servers, len(tensors))
    shards = divide(tensors, servers)
    assert len(shards) == servers
    assert all(shard.pieces for shard in shards)
    assert sorted(p.index for s in shards for p in s.pieces) == list(range(len(tensors)))
    for shard in shards:
        memory = np.zeros(shard.size_bytes, np.uint8)
        for piece, view in zip(shard.pieces, shard.views(memory), strict=True):
            assert piece.offset % tensors[piece.index].element_size() == 0
            assert view.dtype == tensors[piece.index].dtype
            view.copy_(tensors[piece.index])
        packed = np.concatenate([as_bytes(tensors[p.index]) for p in shard.pieces])
        assert (memory == packed).all()
        flats = shard.flats(memory)
        assert sum(flat.numel() * flat.element_size() for flat in flats) == shard.size_bytes
        assert len({flat.dtype for flat in flats}) == len(flats)
        again = Shard.from_wire(shard.to_wire())
        assert again == shard
        assert again.digest == shard.digest


@example([1, 1, 1, 43, 43, 48, 46], 3)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_servers_are_loaded_as_evenly_as_the_tensors_allow(sizes: list[int], servers: int) -> None:
    servers = min(servers, len(sizes))
    shards = divide([torch.empty(size, dtype=torch.uint8) for size in sizes], servers)
    loads = [shard.size_bytes for shard in shards]
    assert max(loads) - min(loads) <= max(sizes)
    # The largest are dealt first, each to the server with the least: whose last tensor is not its
    # only one got that on top of at most the mean of all others (Graham 1969, section 2).
    last = sorted(sizes, reverse=True)[servers] if len(sizes) > servers else 0
    mean = sum(sizes) / servers
    assert max(loads) <= max(max(sizes), mean + last * (1 - 1 / servers)) + 1e-9


def test_more_servers_than_tensors_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(FitError, match="WB-FIT-132") as caught:
        divide([torch.zeros(3), torch.zeros(4)], 3)
    assert caught.value.next_step == "use -o servers=2 or fewer"


def test_hyper_parameters_travel_unchanged() -> None:
    groups = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 1 / 3).param_groups
    values = {k: v for k, v in groups[0].items() if k != "params"}
    assert restored(plain(values)) == values
    assert plain({"lr": torch.tensor(0.5)}) == {"lr": 0.5}
    assert restored({"capturable": True}) == {"capturable": False}
    with pytest.raises(FitError, match=r"'f'.*WB-FIT-116"):
        plain({"f": len})


def test_a_class_is_sent_by_a_name_that_leads_back_to_it() -> None:
    assert importable(torch.optim.Adam) == "torch.optim.adam:Adam"
    with pytest.raises(FitError, match="WB-FIT-115"):
        importable(type("Mine", (torch.optim.SGD,), {"__module__": "__main__"}))
