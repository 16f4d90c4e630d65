"""Lab 6: a model that no worker can hold."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from ..answers import as_read, exercise, number

if TYPE_CHECKING:
    from ..answers import Check

_LAYERS_MS = (72, 64, 26, 20, 18, 16)
"""The time of each layer of the uneven model, as in the lab."""

_HELD = {"gpipe": [6, 6, 6], "1f1b": [3, 2, 1]}
"""What the layers count in the lab. Other counts mean that cells ran out of order."""

_CNN: dict[str, list[int]] = {
    "conv1.weight": [32, 1, 3, 3], "conv1.bias": [32],
    "conv2.weight": [64, 32, 3, 3], "conv2.bias": [64],
    "fc1.weight": [128, 64 * 14 * 14], "fc1.bias": [128], "fc2.weight": [10, 128], "fc2.bias": [10],
}  # fmt: skip
"""The parameters of the four layers."""

_LOOK_AT_CNN = """
def _labs_look():
    torch.manual_seed(0)
    model = RightCNN().eval()
    x, rows = torch.randn(5, 1, 28, 28), []
    if isinstance(getattr(model, "fc1", None), torch.nn.Module):
        model.fc1.register_forward_hook(lambda _, x, y: rows.append(y.numel() // y.shape[-1]))
    with torch.no_grad():
        try:
            out = model(x)
        except RuntimeError as error:
            if "shapes cannot be multiplied" not in str(error):
                raise
            return {"raised": str(error)}
        passed = sum(rows)
        changed = x.clone()
        changed[0] += 1.0
        again = model(changed)
    if not isinstance(out, torch.Tensor):
        return {"kind": type(out).__name__}
    same = out.shape == again.shape
    moved = (out != again).flatten(1).any(1).tolist() if same and out.dim() > 1 else None
    named = dict(model.named_parameters())
    layers = {name: list(one.shape) for name, one in named.items()}
    bias, used, unseen = named.get("conv2.bias"), 0, 196
    if bias is not None:
        bias.data += 1.0  # no map is dead after its ReLU
        x.requires_grad_()
        out = model(x)
        if out.requires_grad:
            of = torch.autograd.grad(out.square().sum(), [bias, x], allow_unused=True)
            used = 0 if of[0] is None else int(of[0].count_nonzero())
            if of[1] is not None:
                parts = of[1].abs().sum((0, 1)).reshape(14, 2, 14, 2).sum((1, 3))
                unseen = int((parts == 0).sum())
    return {"shape": list(out.shape), "moved": moved, "rows": passed, "layers": layers,
            "used": used, "unseen": unseen}
_labs_answer = _labs_look()
del _labs_look
"""


@exercise("6.1", "How many workers are needed")
def workers_needed(c: Check) -> None:
    """Call `workers_needed` with several models and limits, and compare its results."""
    for parameters, limit_bytes in (
        (18_000_000, 180e6),
        (10**9, 16e9),
        (7 * 10**9, 80e9),
        (175 * 10**9, 80e9),
        (11 * 10**9, 24e9),
    ):
        found = c.call("workers_needed", parameters, limit_bytes)
        asked = f"workers_needed({parameters:,}, {limit_bytes:.3g})"
        count = _whole(c, asked, found, "the number of workers is a whole number: round up")
        need = 16 * parameters
        c.need(
            count * limit_bytes >= need,
            f"{asked} returned {count}, but {count} workers do not have enough memory.",
            "add up all rows of the table in section 1, and round up to whole workers",
        )
        c.need(
            (count - 1) * limit_bytes < need,
            f"{asked} returned {count}, but fewer workers are enough.",
            "divide the bytes that training needs by the bytes that one worker may use, and round "
            "up",
        )
    c.expect(True, "`workers_needed` returns the smallest number of workers with enough memory", "")


@exercise("6.2", "One prediction for each image", where="the engines")
def right_cnn(c: Check) -> None:
    """Run `RightCNN` on images. Check the shape of its result and what each row depends on."""
    seen = c.engines("RightCNN")
    c.need(bool(seen), "No engine has a class `RightCNN`.", "run the cell of exercise 6.2")
    answers = c.ask(
        _LOOK_AT_CNN,
        hint="call `RightCNN()(torch.randn(5, 1, 28, 28))` in a new cell on the engines: which "
        "line raises the error?",
    )
    answer: dict[str, Any] = answers[0] if answers and isinstance(answers[0], dict) else {}
    c.need(
        "raised" not in answer,
        f"`RightCNN()(images)` raised RuntimeError: {answer.get('raised')}",
        f"`fc1` has {64 * 14 * 14} inputs, so the input of `fc1` must have exactly this many "
        "numbers for each image",
    )
    c.need(
        "shape" in answer,
        f"`RightCNN()(images)` must be a tensor, but its type is {answer.get('kind', 'unknown')}.",
        "return the output of the last layer from `forward`",
    )
    right = c.expect(
        answer["shape"] == [5, 10],
        "each image of a batch gives one row of ten numbers",
        f"for 5 images, the result has the shape {tuple(answer['shape'])}, but it must be (5, 10)",
        "flatten each image separately: a row must hold all values of one image, and no values "
        "of other images",
    )
    if not right:
        return
    c.expect(
        answer["moved"] == [True, False, False, False, False],
        "each prediction depends only on its own image",
        "the check changed only image 0, so only prediction 0 may change. But these predictions "
        f"changed: {_places(answer['moved'])}",
        "each row of the input of `fc1` must hold one whole image: make the maps smaller before "
        "you flatten them",
    )
    c.expect(
        answer["rows"] <= 5,
        "`fc1` gets one row for each image",
        f"for 5 images, `fc1` got {answer['rows']} rows, but it must get one row for each image",
        "each of these rows holds only a part of an image. The maps of one image have more numbers "
        "than `fc1` has inputs: make the maps smaller before you flatten them",
    )
    layers: dict[str, list[int]] = answer["layers"]
    off = sorted(n for n in {*layers, *_CNN} if layers.get(n) != _CNN.get(n))
    kept = c.expect(
        not off,
        "the four layers are those of `TextbookCNN`",
        f"the parameter `{off[0] if off else ''}` is {_shape(layers, off)} in `RightCNN`, but it "
        f"is {_shape(_CNN, off)} in `TextbookCNN`",
        "keep the four layers and their names, and add no other layer with parameters: the "
        "operation that you need has no parameters",
    )
    if not kept:
        return
    c.need(
        answer["used"] == 64,
        f"The predictions depend on only {answer['used']} of the 64 maps of `conv2`.",
        "make each map smaller, but use all maps",
    )
    c.expect(True, "the predictions use all maps of `conv2`", "")
    c.expect(
        answer["unseen"] == 0,
        "the predictions use all parts of an image",
        "an image has 196 squares of 2 x 2 pixels, but the predictions do not depend on "
        f"{answer['unseen']} of these squares",
        "combine neighbouring numbers of each map, so that the map becomes smaller; do not cut "
        "out a part of the map",
    )


def _shape(layers: dict[str, list[int]], names: list[str]) -> str:
    found = layers.get(names[0]) if names else None
    return "missing" if found is None else f"of shape {tuple(found)}"


@exercise("6.3", "The bubble")
def bubble(c: Check) -> None:
    """Call `bubble` with several numbers, and check `m_10`."""
    for p, m in ((2, 1), (3, 3), (3, 9), (4, 8), (16, 64)):
        found = c.number_from("bubble", p, m)
        idle = (p - 1) / (m + p - 1)
        c.need(
            as_read(found, idle, least=3),  # two decimals would give another `m_10`
            f"bubble({p}, {m}) returned {found:.4g}, but this is not the idle fraction of {p} "
            f"stages with {m} microbatches.",
            "do not round the result"
            if math.isclose(found, idle, abs_tol=0.005)
            else "a stage works in m of the m + p - 1 turns; in how many turns is the stage idle?",
        )
    c.expect(
        True,
        "`bubble` returns the number of turns in which a stage is idle, divided by the number of "
        "all turns",
        "",
    )
    count = c.whole("m_10")
    c.expect(
        count >= 1 and 3 / (count + 3) <= 0.1 + 1e-12,
        "with `m_10` microbatches, the bubble is at most 10 %",
        f"with {count} microbatches, four stages are idle for more than 10 % of the time",
        "call `bubble(4, m)` with larger values of m",
    )
    c.expect(
        3 / (count - 1 + 3) > 0.1 if count > 0 else False,
        "with one microbatch fewer, the bubble would be larger than 10 %",
        f"`m_10` is {count}, but this is not the smallest number with a bubble of at most 10 %",
        "call `bubble(4, m)` with m = 1, 2, 3, ...; a bubble of exactly 10 % is allowed",
    )


@exercise("6.4", "Microbatches in memory")
def in_flight(c: Check) -> None:
    """Compare both lists with the layers' counts during the two runs."""
    for name, schedule in (("held_gpipe", "gpipe"), ("held_1f1b", "1f1b")):
        counted = _counted(c, f"most_{schedule}")
        c.need(
            counted == _HELD[schedule],
            f"The counts in `most_{schedule}` on the engines are wrong: a complete run "
            f"'{schedule}-6' has other counts.",
            "run the cells again in order, beginning with the cell that trains the run 'gpipe-6'",
        )
        given = [
            _whole(c, f"`{name}`[{i}]", one, "a stage holds whole microbatches: count them")
            for i, one in enumerate(c.items(name, 3))
        ]
        stage = next((stage for stage in range(3) if given[stage] != counted[stage]), 0)
        many = "microbatch" if given[stage] == 1 else "microbatches"
        c.expect(
            given == counted,
            f"{schedule}: the number of microbatches is right for each stage",
            f"{schedule}: in `{name}`, stage {stage} has {given[stage]} {many}, but the layers of "
            "this stage counted another number",
            "with gpipe, a stage begins its first backward pass after its last forward pass"
            if schedule == "gpipe"
            else _hint_1f1b(stage, given[stage] > counted[stage]),
        )


def _hint_1f1b(stage: int, too_many: bool) -> str:
    """Return where to look if the number of microbatches of one of three stages is wrong."""
    if stage == 2:
        return (
            "stage 2 is the last stage, so it does not wait for a later stage: in 1f1b, when does "
            "it run the backward pass of microbatch 0?"
        )
    if too_many and stage == 0:
        return (
            "in section 5, look at the line of stage 0 under 1f1b: F2 could begin right after F1; "
            "why is the stage idle?"
        )
    return (
        f"with 1f1b, microbatch 0 comes back to stage {stage} only after it has been in all later "
        f"stages. How many forward passes does stage {stage} run before that?"
    )


@exercise("6.5", "Cuts for balanced stages", where="the engines", cell="the notebook")
def balanced(c: Check) -> None:
    """Check the cuts of the run `balanced`."""
    text = c.text("cuts")
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = []
    c.need(
        len(wanted) == 2
        and 0 < wanted[0] < wanted[1] < len(_LAYERS_MS)
        and text == f"{wanted[0]},{wanted[1]}",
        f"`cuts` is {text!r}, but it must name two layers.",
        "write the numbers of the two layers at which stages 1 and 2 begin, in order and without "
        'spaces, such as "2,4"',
    )
    run = c.run("balanced")
    c.need(
        run.plan.options.get("split_at") == text,
        f"The run 'balanced' used split_at={run.plan.options.get('split_at')}, but `cuts` is "
        f"{text}.",
        "run the whole cell of exercise 6.5 again",
    )
    best = min(_slowest_ms(cut) for cut in itertools.combinations(range(1, len(_LAYERS_MS)), 2))
    mine = _slowest_ms((wanted[0], wanted[1]))
    right = c.expect(
        mine == best,
        "with your cuts, the slowest stage is as fast as possible",
        f"with your cuts the slowest stage takes {mine} ms, but with other cuts the slowest stage "
        "takes less time",
        "stages may have different numbers of layers: add up the times of the layers in each "
        "stage, and make the largest of the three sums as small as possible",
    )
    if right:
        c.expect(
            _median_s(run) < _median_s(c.run("uneven")),
            "a step of the run 'balanced' takes less time than a step of the run 'uneven'",
            "a step of the run 'balanced' must take less time than a step of the run 'uneven', but "
            "it does not",
            "in the cell, change only `cuts`; if you changed nothing else, the machine was busy: "
            "run the cell again",
        )


def _median_s(run: Any) -> float:
    steps = sorted(float(value) for value in run.history["step_s"])
    return steps[len(steps) // 2] if steps else math.nan


def _slowest_ms(cuts: tuple[int, int]) -> int:
    edges = (0, *cuts, len(_LAYERS_MS))
    return max(sum(_LAYERS_MS[i:j]) for i, j in itertools.pairwise(edges))


def _counted(c: Check, name: str) -> list[int]:
    """Return the most microbatches that each stage held, by rank."""
    found = c.ask(f"_labs_answer = list(globals().get({name!r}, {{}}).values())")
    c.need(
        len(found) >= 3 and all(isinstance(one, list) and one for one in found[:3]),
        f"`{name}` is empty or missing on the engines.",
        "run the cells of sections 3, 4 and 5 in order",
    )
    return [max(int(count) for count in one) for one in found[:3]]


def _whole(c: Check, what: str, value: Any, hint: str) -> int:
    """Return a whole number, or end the check because the value is not one.

    Args:
        hint: What to do with a fraction.
    """
    said = f"{what} is {value!r}, but it must be a whole number."
    try:
        found = number(value)
        whole = int(found)
    except (TypeError, ValueError, OverflowError):
        c.wrong(said, "use a whole number, without quotes")
    c.need(found == whole, said, hint)
    return whole


def _places(moved: Any) -> str:
    return ", ".join(str(i) for i, one in enumerate(moved or []) if one) or "none"
