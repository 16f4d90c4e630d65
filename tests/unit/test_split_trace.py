"""Where a traced model is cut, and that its pieces together are the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import model_zoo  # noqa: E402
from torch import nn  # noqa: E402

from workbench.engine.contract import Job  # noqa: E402
from workbench.errors import FitError  # noqa: E402
from workbench.strategies.torch.pipeline.measure import check_enough, shared  # noqa: E402
from workbench.strategies.torch.pipeline.program import Output, program_of  # noqa: E402
from workbench.strategies.torch.pipeline.trace import (  # noqa: E402
    Call,
    calls_of,
    traced_layers,
)

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Named(nn.Module):
    """A child called `self`, layers that do nothing, one that is called twice, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("self", nn.Linear(4, 6))
        self.nothing, self.drop = nn.Identity(), nn.Dropout(0.0)
        self.twice, self.relu = nn.Linear(6, 6), nn.ReLU(inplace=True)
        self.last, self.idle = nn.Linear(6, 2), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        first = self.relu(self.nothing(getattr(self, "self")(x)))  # noqa: B009
        with torch.no_grad():
            scale = torch.arange(6, device=x.device).to(x.dtype).cos()
        h = self.twice(self.relu(self.twice(first))) * scale
        return {"out": self.last(self.drop(h) + first), "steps": 3, "none": None}


def layers_of(model: Any, batch: Any, stages: int, **objective: Any) -> tuple[list[Any], Any]:
    given = {"loss": lambda out, y: out, "step_fn": None, **objective}
    job = Job(model, given["loss"], given["step_fn"], None, len(batch), 1, 1)
    layers, outputs = traced_layers(model, program_of(job, batch), CPU, stages)
    return layers, outputs


def run(pieces: list[Any], values: tuple[Any, ...], output: Output) -> Any:
    for piece in pieces:
        result = piece(*values)
        values = result if isinstance(result, tuple) else (result,)
    return output.restore(result)


@pytest.mark.parametrize("name", ["nanogpt_adamw", "resnet_groupnorm", "lstm", "vit", "encoder"])
def test_the_pieces_of_a_model_are_the_model_in_both_modes(name: str) -> None:
    case = model_zoo.CASES[name]()
    x = case.data[0][:4]
    layers, outputs = layers_of(case.model, (x, x), 2)
    assert len(layers) >= 4
    for mode, form in zip((True, False), outputs, strict=True):
        pieces = [layer.training if mode else layer.evaluating for layer in layers]
        assert torch.allclose(run(pieces, (x,), form), case.model.train(mode)(x), atol=1e-12)
    held = {name for layer in layers for name in layer.names}
    assert held == set(case.model.state_dict())


def test_names_identities_repeated_calls_and_structured_outputs() -> None:
    model, x = Named(), torch.randn(3, 4)
    layers, outputs = layers_of(model, (x, x), 2)
    assert [layer.name for layer in layers] == ["self", "drop", "last"]
    answer = run([layer.training for layer in layers], (x,), outputs[0])
    assert torch.allclose(answer["out"], model(x)["out"])
    assert (answer["steps"], answer["none"]) == (3, None)
    assert "idle.weight" in layers[-1].names  # not used, yet somebody holds it


def test_a_form_without_memory_is_traced_for_the_device_it_will_run_on() -> None:
    with torch.device("meta"):
        model = Named()
    layers, outputs = layers_of(model, (torch.randn(3, 4), None), 2)
    real = Named()
    for layer in layers:
        for name, tensor in real.named_parameters():
            path, _, leaf = name.rpartition(".")
            if name in layer.names and name in dict(layer.training.body.named_parameters()):
                setattr(layer.training.body.get_submodule(path), leaf, tensor)
    x = torch.randn(3, 4)
    answer = run([layer.training for layer in layers], (x,), outputs[0])
    assert torch.allclose(answer["out"], real(x)["out"])


def test_cuts_lie_between_blocks_until_stages_need_parts_of_them() -> None:
    case = model_zoo.nanogpt_adamw()
    two, _ = layers_of(case.model, (case.data[0][:4],) * 2, 2)
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert [layer.name for layer in two][3:6] == blocks
    assert {layer.name for layer in two}.isdisjoint(f"{block}.attn" for block in blocks)
    many, _ = layers_of(case.model, (case.data[0][:4],) * 2, 12)
    assert len(many) >= 12
    assert f"{blocks[0]}.mlp.0" in [layer.name for layer in many]


def test_what_is_the_same_for_every_batch_is_not_handed_on() -> None:
    case = model_zoo.nanogpt_adamw()
    layers, _ = layers_of(case.model, (case.data[0][:4],) * 2, 2)
    values: tuple[Any, ...] = (case.data[0][:4],)
    for layer in layers[:-1]:
        result = layer.training(*values)
        values = result if isinstance(result, tuple) else (result,)
    assert [tuple(value.shape) for value in values] == [(4, 8, 16)]


def test_a_step_function_of_a_form_without_memory_keeps_the_batch() -> None:
    model, batch = nn.Linear(4, 2, device="meta"), (torch.randn(6, 4), torch.randn(6, 2))
    job = Job(model, None, lambda m, b: (m(b[0]) - b[1]).square().mean(), None, 6, 1, 1)
    assert program_of(job, batch).tensors[0] is batch[0]


def test_a_step_function_that_calls_the_model_once_leaves_the_loss_outside() -> None:
    model, batch = nn.Linear(4, 2), {"x": torch.randn(6, 4), "y": torch.randn(6, 2)}
    job = Job(model, None, lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), None, 6, 1, 1)
    program = program_of(job, batch)
    assert not program.scored
    assert program.places == [0]
    assert program.loss is not None
    out = program.call(model, program.data)
    assert torch.equal(program.loss(out, program.target(batch)), job.step_fn(model, batch))


@pytest.mark.parametrize(
    "step_fn",
    [
        lambda m, b: m(b[0]).mean() + m(b[1]).mean(),
        lambda m, b: m(b[0] + torch.randn_like(b[0])).mean(),
        lambda m, b: m.weight.sum() * b[0].mean(),
    ],
    ids=["called twice", "noise", "weights"],
)
def test_other_step_functions_are_traced_with_the_model_in_them(step_fn: Any) -> None:
    job = Job(nn.Linear(4, 2), None, step_fn, None, 6, 1, 1)
    assert program_of(job, (torch.randn(6, 4), torch.randn(6, 4))).scored


def test_tied_parameters_are_found_under_their_first_name() -> None:
    case = model_zoo.nanogpt()
    layers, _ = layers_of(case.model, tuple(t[:4] for t in case.data), 2, **case.objective)
    bounds = [0, 4, len(layers)]
    assert shared(case.model, layers, bounds) == {"transformer.wte.weight": [0, 1]}
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(layers[0].names)


def test_too_few_calls_say_what_a_cut_needs() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    layers, _ = layers_of(One(), (torch.randn(2, 4), None), 2)
    with pytest.raises(FitError, match=r"WB-FIT-137[\s\S]*in forward"):
        check_enough(layers, 2, 2, traced=True)


def test_calls_are_read_from_the_stacks_of_nodes() -> None:
    stacks = [["a"], ["b", "b.c"], ["b", "b.d"], ["a@1"], ["e"], [], ["e"]]
    calls = calls_of(stacks)
    assert calls == {
        "": Call(0, ["b"]), "b": Call(1, ["b.c", "b.d"]), "b.c": Call(1), "b.d": Call(2),
    }  # fmt: skip
