"""Lab 6: a model that no worker can hold."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from ..answers import exercise

if TYPE_CHECKING:
    from ..answers import Check

_LAYERS_MS = (72, 64, 26, 20, 18, 16)
"""What each layer of the uneven model takes, as the lab says."""

_HELD = {"gpipe": [6, 6, 6], "1f1b": [3, 2, 1]}
"""What layers count in three stages with six microbatches, unless cells ran out of order."""

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
    """Sixteen bytes per parameter, divided and rounded up."""
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
            f"{asked} returned {count}: so many workers have no room for it.",
            "count all that the table above names, and remember that a worker cannot be cut in two",
        )
        c.need(
            (count - 1) * limit_bytes < need,
            f"{asked} returned {count}: fewer would do.",
            "the bytes in all, divided by what one worker may take, rounded up",
        )
    c.expect(True, "the workers have room for parameters, gradients and moments, and none is "
             "too many", "")  # fmt: skip


@exercise("6.2", "One prediction for each image", where="the engines")
def right_cnn(c: Check) -> None:
    """As many rows as images, each of its own image and of all its maps."""
    seen = c.engines("RightCNN")
    c.need(bool(seen), "No engine has a `RightCNN`.")
    answers = c.ask(_LOOK_AT_CNN)
    answer: dict[str, Any] = answers[0] if answers and isinstance(answers[0], dict) else {}
    c.need(
        "shape" in answer,
        f"RightCNN()(images) is a {answer.get('kind', 'value that cannot be read')}.",
        "forward returns the last layer's output: a tensor",
    )
    right = c.expect(
        answer["shape"] == [5, 10],
        "a batch of images gives as many rows of ten numbers",
        f"5 images give the shape {tuple(answer['shape'])}",
        "rows are images: only what belongs to one image may be flattened",
    )
    if not right:
        return
    c.expect(
        answer["moved"] == [True, False, False, False, False],
        "a prediction depends on its own image",
        f"another first image changes the predictions {_places(answer['moved'])} of 5",
        "rows that are cut off after the fact still hold parts of other images: make the maps "
        "smaller before they are flattened",
    )
    c.expect(
        answer["used"] == 64,
        "all maps of conv2 take part",
        f"the predictions have a gradient for only {answer['used']} of the 64 maps of conv2",
        "shrink each map, do not leave maps out",
    )
    c.expect(
        answer["fc1"] == [128, 64 * 14 * 14],
        "`fc1` has the inputs that its author had in mind",
        f"`fc1` has the weights {tuple(answer['fc1'])}",
        "leave the layers as they are; something between conv2 and fc1 is lacking",
    )


@exercise("6.3", "The bubble")
def bubble(c: Check) -> None:
    """(p - 1) / (m + p - 1), and the microbatches that it asks for."""
    for p, m in ((2, 1), (3, 3), (3, 9), (4, 8), (16, 64)):
        found = c.number_from("bubble", p, m)
        c.need(
            math.isclose(found, (p - 1) / (m + p - 1), rel_tol=1e-6),
            f"bubble({p}, {m}) returned {found:.4g}, which is not that pipeline's idle share.",
            "of m + p - 1 turns, a stage works in m",
        )
    c.expect(True, "`bubble` is the share of the turns in which a stage stands idle", "")
    count = c.whole("m_10")
    c.expect(
        count >= 1 and 3 / (count + 3) <= 0.1 + 1e-12,
        "so many microbatches are enough",
        f"with {count} microbatches, four stages stand idle for more than 10 % of the time",
        "ask your function with p = 4 and more microbatches",
    )
    c.expect(
        3 / (count - 1 + 3) > 0.1 if count > 0 else False,
        "and one fewer would not be",
        f"{count} is not the smallest number of microbatches that will do",
        "try one number after the other; at most 10 % includes 10 % itself",
    )


@exercise("6.4", "Microbatches in memory")
def in_flight(c: Check) -> None:
    """What the layers counted during the two runs."""
    for name, schedule in (("held_gpipe", "gpipe"), ("held_1f1b", "1f1b")):
        counted = _counted(c, f"most_{schedule}")
        c.need(
            counted == _HELD[schedule],
            f"What the engines hold in most_{schedule} is not from its run.",
            "run the cells from the run gpipe-6 on, in their order",
        )
        given = [_whole(c, f"`{name}`[{i}]", one) for i, one in enumerate(c.items(name, 3))]
        off = [stage for stage in range(3) if given[stage] != counted[stage]]
        c.expect(
            not off,
            f"{schedule}: each stage held as many as you say",
            f"{schedule}: stage {off[0] if off else 0} did not hold "
            f"{given[off[0]] if off else ''} microbatches at its worst moment",
            "gpipe begins no backward before the last forward"
            if schedule == "gpipe"
            else "a microbatch that leaves stage 0 comes back to it after all later stages had it; "
            "the last stage has nobody to wait for",
        )


@exercise("6.5", "The slowest stage as fast as can be", where="the engines", cell="the notebook")
def balanced(c: Check) -> None:
    """The run's own cuts, and what its slowest stage has to do."""
    text = c.text("cuts")
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = []
    c.need(
        len(wanted) == 2 and min(wanted) > 0 and wanted[0] < wanted[1] < len(_LAYERS_MS),
        f"`cuts` is {text!r}.",
        'two numbers of layers in their order, such as "2,4": where stages 1 and 2 begin',
    )
    run = c.run("balanced")
    c.need(
        run.plan.options.get("split_at") == text,
        f"The run 'balanced' was cut at {run.plan.options.get('split_at')}, `cuts` says {text}.",
        "run the whole cell again",
    )
    best = min(_slowest_ms(cut) for cut in itertools.combinations(range(1, len(_LAYERS_MS)), 2))
    mine = _slowest_ms((wanted[0], wanted[1]))
    right = c.expect(
        mine == best,
        "no other cuts leave the slowest stage less to do",
        f"your slowest stage has {mine} ms to do; there are cuts with a faster one",
        "stages need not have the same number of layers: add up the times, and cut so that the "
        "largest sum is as small as it can be",
    )
    if right:
        c.expect(
            _median_s(run) < _median_s(c.run("uneven")),
            "the step is shorter than with two layers each, as measured",
            "the step took no less time than with two layers each",
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
        f"The engines have counted nothing in `{name}`.",
        "run the cells of sections 3, 4 and 5 in their order",
    )
    return [max(int(count) for count in one) for one in found[:3]]


def _whole(c: Check, what: str, value: Any) -> int:
    """Return a whole number, or say that it is none."""
    try:
        number = float(value)
        if isinstance(value, bool) or number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        c.wrong(f"{what} is {value!r}: a whole number is asked for.")
    return int(number)


def _places(moved: Any) -> str:
    return ", ".join(str(i) for i, one in enumerate(moved or []) if one) or "none"
