"""Lab 6: a model that no worker can hold."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from ..answers import exercise

if TYPE_CHECKING:
    from ..answers import Check

_LAYERS_MS = (72, 64, 26, 20, 18, 16)
"""The time of each layer of the uneven model, as in the lab."""

_HELD = {"gpipe": [6, 6, 6], "1f1b": [3, 2, 1]}
"""What the layers count in the lab. Other counts mean that cells ran out of order."""

_LOOK_AT_CNN = """
def _labs_look():
    torch.manual_seed(0)
    model = RightCNN().eval()
    x = torch.randn(5, 1, 28, 28)
    with torch.no_grad():
        out = model(x)
        changed = x.clone()
        changed[0] += 1.0
        again = model(changed)
    if not isinstance(out, torch.Tensor):
        return {"kind": type(out).__name__}
    same = out.shape == again.shape
    moved = (out != again).flatten(1).any(1).tolist() if same and out.dim() > 1 else None
    named = dict(model.named_parameters())
    fc1 = list(named["fc1.weight"].shape) if "fc1.weight" in named else []
    bias, of = named.get("conv2.bias"), None
    if bias is not None:
        bias.data += 1.0  # no map is dead after its ReLU
        out = model(x)
        if out.requires_grad:
            of = torch.autograd.grad(out.square().sum(), bias, allow_unused=True)[0]
    used = 0 if of is None else int(of.count_nonzero())
    return {"shape": list(out.shape), "moved": moved, "fc1": fc1, "used": used}
_labs_answer = _labs_look()
del _labs_look
"""


@exercise("6.1", "How many workers it takes")
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
        count = _whole(c, asked, found)
        need = 16 * parameters
        c.need(
            count * limit_bytes >= need,
            f"{asked} returned {count}, but this many workers do not have enough memory.",
            "count all rows of the table above, and round up to whole workers",
        )
        c.need(
            (count - 1) * limit_bytes < need,
            f"{asked} returned {count}, but fewer workers are enough.",
            "divide the total bytes by the bytes that one worker may use, and round up",
        )
    c.expect(True, "the workers have enough memory for parameters, gradients and moments, and "
             "there is no worker too many", "")  # fmt: skip


@exercise("6.2", "One prediction for each image", where="the engines")
def right_cnn(c: Check) -> None:
    """Run `RightCNN` on images. Check the shape of its result and what each row depends on."""
    seen = c.engines("RightCNN")
    c.need(bool(seen), "No engine has a class `RightCNN`.")
    answers = c.ask(_LOOK_AT_CNN)
    answer: dict[str, Any] = answers[0] if answers and isinstance(answers[0], dict) else {}
    c.need(
        "shape" in answer,
        f"RightCNN()(images) is a {answer.get('kind', 'value that cannot be read')}.",
        "forward must return the last layer's output, which is a tensor",
    )
    right = c.expect(
        answer["shape"] == [5, 10],
        "each image of a batch gives one row of ten numbers",
        f"5 images give the shape {tuple(answer['shape'])}",
        "each row is one image: flatten only the values of one image into a row",
    )
    if not right:
        return
    c.expect(
        answer["moved"] == [True, False, False, False, False],
        "a prediction depends on its own image",
        f"changing the first image changes the predictions {_places(answer['moved'])} of 5",
        "removing rows at the end is too late, because each row holds parts of other images: make "
        "the maps smaller before you flatten them",
    )
    c.expect(
        answer["used"] == 64,
        "all maps of conv2 are used",
        f"the predictions have a gradient for only {answer['used']} of the 64 maps of conv2",
        "make each map smaller, but leave out no map",
    )
    c.expect(
        answer["fc1"] == [128, 64 * 14 * 14],
        "`fc1` has 64 · 14 · 14 inputs",
        f"`fc1` has the weights {tuple(answer['fc1'])}",
        "do not change the layers: an operation before fc1 is missing",
    )


@exercise("6.3", "The bubble")
def bubble(c: Check) -> None:
    """Call `bubble` with several numbers, and check `m_10`."""
    for p, m in ((2, 1), (3, 3), (3, 9), (4, 8), (16, 64)):
        found = c.number_from("bubble", p, m)
        c.need(
            math.isclose(found, (p - 1) / (m + p - 1), rel_tol=1e-6),
            f"bubble({p}, {m}) returned {found:.4g}, which is not that pipeline's idle fraction.",
            "a stage works in m of the m + p - 1 turns",
        )
    c.expect(True, "`bubble` is the fraction of the turns in which a stage is idle", "")
    count = c.whole("m_10")
    c.expect(
        count >= 1 and 3 / (count + 3) <= 0.1 + 1e-12,
        "this number of microbatches is enough",
        f"with {count} microbatches, four stages are idle for more than 10 % of the time",
        "call your function with p = 4 and more microbatches",
    )
    c.expect(
        3 / (count - 1 + 3) > 0.1 if count > 0 else False,
        "one microbatch fewer would not be enough",
        f"{count} is not the smallest number of microbatches that is enough",
        "try one number after the other: at most 10 % includes 10 % itself",
    )


@exercise("6.4", "Microbatches in memory")
def in_flight(c: Check) -> None:
    """Compare both lists with the layers' counts during the two runs."""
    for name, schedule in (("held_gpipe", "gpipe"), ("held_1f1b", "1f1b")):
        counted = _counted(c, f"most_{schedule}")
        c.need(
            counted == _HELD[schedule],
            f"most_{schedule} on the engines is not from the run with that schedule.",
            "run the cells again in order, beginning with the run gpipe-6",
        )
        given = [_whole(c, f"`{name}`[{i}]", one) for i, one in enumerate(c.items(name, 3))]
        off = [stage for stage in range(3) if given[stage] != counted[stage]]
        c.expect(
            not off,
            f"{schedule}: the number of microbatches is right for each stage",
            f"{schedule}: {given[off[0]] if off else ''} is not the largest number of "
            f"microbatches that stage {off[0] if off else 0} held at once",
            "gpipe does not begin a backward pass before the last forward pass"
            if schedule == "gpipe"
            else "a microbatch comes back to stage 0 after it has been in all later stages, but "
            "the last stage does not have to wait for another stage",
        )


@exercise("6.5", "The fastest slowest stage", where="the engines", cell="the notebook")
def balanced(c: Check) -> None:
    """Check the cuts of the run `balanced`."""
    text = c.text("cuts")
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = []
    c.need(
        len(wanted) == 2 and min(wanted) > 0 and wanted[0] < wanted[1] < len(_LAYERS_MS),
        f"`cuts` is {text!r}.",
        'write the two layers at which stages 1 and 2 begin, in order, such as "2,4"',
    )
    run = c.run("balanced")
    c.need(
        run.plan.options.get("split_at") == text,
        f"The run 'balanced' was cut at {run.plan.options.get('split_at')}, but `cuts` is {text}.",
        "run the whole cell again",
    )
    best = min(_slowest_ms(cut) for cut in itertools.combinations(range(1, len(_LAYERS_MS)), 2))
    mine = _slowest_ms((wanted[0], wanted[1]))
    right = c.expect(
        mine == best,
        "with no other cuts the slowest stage has less work",
        f"your slowest stage takes {mine} ms, but with other cuts it takes less",
        "stages may have different numbers of layers: add up the times, and cut so that the "
        "largest sum is as small as possible",
    )
    if right:
        c.expect(
            _median_s(run) < _median_s(c.run("uneven")),
            "the measured step is shorter than with two layers in each stage",
            "the step took no less time than with two layers in each stage",
            "was the machine busy? Run the cell again",
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


def _whole(c: Check, what: str, value: Any) -> int:
    """Return a whole number, or end the check because the value is not one."""
    try:
        number = float(value)
        if isinstance(value, bool) or number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        c.wrong(f"{what} is {value!r}, but it must be a whole number.")
    return int(number)


def _places(moved: Any) -> str:
    return ", ".join(str(i) for i, one in enumerate(moved or []) if one) or "none"
