from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from workbench.errors import FitError  # noqa: E402
from workbench.strategies.torch.gossip import neighbours  # noqa: E402
from workbench.strategies.torch.sharded import units  # noqa: E402
from workbench.strategies.torch.tensor_parallel import describe, find_plan, given_plan  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.out_proj = nn.Linear(8, 8)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)


def test_neighbours_in_a_sequential_are_a_pair() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Linear(8, 2),
    )
    found, safe = find_plan(model, 2)
    assert found == safe == {"0": "col", "2": "row", "4": "col", "5": "row"}


@pytest.mark.parametrize(
    "between", [nn.LayerNorm(8), nn.Softmax(-1), nn.Dropout(0.1), nn.Flatten()]
)
def test_what_looks_at_whole_rows_keeps_layers_apart(between: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))
    assert find_plan(model, 2)[1] == {"0": "gathered", "2": "gathered"}


def test_a_width_that_does_not_divide_makes_no_pair() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4))
    assert find_plan(model, 2)[1] == {"0": "gathered", "2": "gathered"}


def test_usual_names_are_guessed_and_kept_apart_from_what_is_sure() -> None:
    found, safe = find_plan(nn.Sequential(Block()), 2)
    assert set(safe.values()) == {"gathered"}
    assert found["0.fc1"] == "col"
    assert found["0.fc2"] == found["0.out_proj"] == "row"
    assert {found[f"0.{name}_proj"] for name in "qkv"} == {"heads"}


def test_narrow_tied_and_attention_layers() -> None:
    tied = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    model = nn.ModuleList([tied, nn.MultiheadAttention(8, 2), nn.Linear(8, 1), nn.Embedding(9, 4)])
    assert find_plan(model, 2)[1] == {"2": "split_row", "3": "gathered"}


def test_a_weight_that_is_computed_from_others_is_left_whole() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8),
    )  # fmt: skip
    assert find_plan(model, 2) == ({"4": "gathered"}, {"4": "gathered"})


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(FitError, match="WB-FIT-151") as caught:
        find_plan(nn.Sequential(nn.Conv2d(1, 4, 3)), 2)
    assert "Conv2d" in str(caught.value.seen)


def test_plans_are_given_by_name_with_wildcards() -> None:
    model = nn.Sequential(Block(), Block())
    assert given_plan(model, "*.fc1=col, *.fc2=row", 2) == {
        "0.fc1": "col", "1.fc1": "col", "0.fc2": "row", "1.fc2": "row",
    }  # fmt: skip
    for text, says in (("*.fc1", "WB-FIT-152"), ("*.fc9=col", "WB-FIT-153")):
        with pytest.raises(FitError, match=says):
            given_plan(model, text, 2)


def test_the_plan_is_told_with_its_part_of_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8))
    assert describe(model, {"0": "gathered"}).split("0=gathered ")[1].startswith("(67%")


def test_units_are_elements_of_lists_and_plain_layers_inner_ones_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
            self.blocks = nn.ModuleList([Block(), Block()])
            self.block = Block()
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

    model = Model()
    names = {module: name for name, module in model.named_modules()}
    found = [names[unit] for unit in units(model, 0)]
    # The tied layers stay with the whole, as does a block that is in no list.
    assert sorted(found) == ["blocks.0", "blocks.1", "layers.0.0", "layers.0.1"]
    assert units(model, 1e9) == []


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_mixing_keeps_the_mean_in_every_step(graph: str, workers: int) -> None:
    for step in range(8):
        mixing = torch.zeros(workers, workers, dtype=torch.float64)
        for rank in range(workers):
            to, sources = neighbours(graph, rank, workers, step)
            assert rank not in to
            assert all(rank in neighbours(graph, other, workers, step)[1] for other in to)
            for other in (rank, *sources):
                mixing[rank, other] += 1 / (len(sources) + 1)
        ones = torch.ones(workers, dtype=torch.float64)
        assert torch.allclose(mixing.sum(0), ones)
        assert torch.allclose(mixing.sum(1), ones)


def test_on_the_exponential_graph_all_have_met_after_k_steps() -> None:
    product = torch.eye(8, dtype=torch.float64)
    for step in range(3):
        mixing = torch.eye(8, dtype=torch.float64) / 2
        for rank in range(8):
            mixing[rank, neighbours("exponential", rank, 8, step)[1][0]] += 0.5
        product = mixing @ product
    assert torch.allclose(product, torch.full((8, 8), 1 / 8, dtype=torch.float64))
