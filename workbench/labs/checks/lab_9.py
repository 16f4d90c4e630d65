"""Lab 9: choose a strategy blind, predict what it achieves, and be scored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..answers import exercise
from ..blind import PRACTICE, STRATEGIES, WARM_UP, Case, choice_score, draw, seed_of

if TYPE_CHECKING:
    from ..answers import Check

PROBED = {"t1_s": 1.35, "latency_s": 1.25, "bytes_per_s": 1.12}
"""The largest factor between a probed number and the truth. Real steps and messages take time too,
but this time cancels in the difference of two messages. One message of 1 MB is off by 1.15."""

PREDICTED = 1.5
ENOUGH = 0.9
"""The least share of the best rate, by the formulae. Measured rates do not decide: they vary, and
the second-best strategy of a case reaches up to 0.854. Strategies that tie reach 1."""

_CASES = (
    Case("P", 3, 1000, (1.0, 1.0, 1.0), 0.18, 0.015, 10e6),
    Case("P", 2, 400, (2.0, 1.0), 0.05, 0.002, 4e6, batch=40),
    Case("P", 4, 800, (1.0, 1.0, 1.0, 3.0), 0.2, 0.03, 50e6, batch=120),
)
"""The cases on which the formulae are tried."""


def expected(case: Case) -> dict[str, float]:
    """Return the predicted samples per second of each strategy."""
    n, share_s = case.workers, case.whole_s / case.workers
    carry_s = case.size_bytes / case.bytes_per_s
    ring_s = 2 * (n - 1) * (case.latency_s + carry_s / n)
    server_s = 2 * (case.latency_s + carry_s)
    slowest_s = share_s * max(case.factors)
    pushes = (case.batch / n / (share_s * factor + server_s) for factor in case.factors)
    rates = (
        case.batch / case.whole_s,
        case.batch / (slowest_s + ring_s),
        case.batch / (slowest_s + server_s),
        sum(pushes),
    )
    return dict(zip(STRATEGIES, rates, strict=True))


@exercise("9.1", "Three numbers from two probes")
def probed(c: Check) -> None:
    """Compare the three numbers with those of the practice case."""
    for name, truth, words, hint in (
        ("t1_s", PRACTICE.whole_s, "the time of a step on one device, in seconds",
         "blind.time_step(case) returns this time in seconds"),
        ("latency_s", PRACTICE.latency_s, "the latency of the link, in seconds",
         "a message of a few bytes takes only a little longer than the latency"),
        ("bytes_per_s", PRACTICE.bytes_per_s,
         "the number of bytes that the link carries in a second",
         "measure the times of a short and a long message: how many more bytes does the long "
         "message have, and how many more seconds does it take?"),
    ):  # fmt: skip
        found = c.number_of(name)
        c.expect(
            found > 0 and max(found / truth, truth / found) <= PROBED[name],
            f"`{name}` is {words}",
            f"`{name}` is {found:.4g}, which does not agree with the probes of case P",
            hint,
        )


def _facts(case: Case) -> dict[str, Any]:
    return {
        **case.card, "t1_s": case.whole_s, "latency_s": case.latency_s,
        "bytes_per_s": case.bytes_per_s,
    }  # fmt: skip


def _differs(c: Check, name: str, args: tuple[Any, ...], truth: float) -> str:
    """Call a function of the notebook; return what is wrong with its result, or nothing."""
    value = c.number_from(name, *args)
    return (
        ""
        if math.isclose(value, truth, rel_tol=1e-3)
        else f"`{name}` returned the wrong number {value:.4g}"
    )


_HINTS = {
    "one_device": "one device computes the whole batch in T₁ seconds, and sends no messages",
    "mirrored": "a step takes the time of the slowest worker's share, plus the time of 2(N-1) "
    "messages of M/N bytes each",
    "central_storage": "a step takes the time of the slowest worker's share, plus the time of two "
    "messages of M bytes each",
}


@exercise("9.2", "Strategies that wait")
def together(c: Check) -> None:
    """Call `rate` for several cases, and compare its results."""
    for strategy in STRATEGIES[:3]:
        wrong = ""
        for case in _CASES:
            facts = _facts(case)
            wrong = _differs(c, "rate", (strategy, facts), expected(case)[strategy])
            if wrong:
                wrong += f" for {strategy!r} and {facts}"
                break
        c.expect(
            not wrong,
            f"`rate` is right for {strategy!r}, with equally fast workers and with a slow worker",
            wrong,
            _HINTS[strategy],
        )


@exercise("9.3", "A strategy that does not wait")
def apart(c: Check) -> None:
    """Call `server_rate` for several cases, and compare its results."""
    for case in _CASES:
        facts = _facts(case)
        wrong = _differs(c, "server_rate", (facts,), expected(case)["parameter_server"])
        c.need(
            not wrong,
            f"{wrong} for {facts}",
            "each worker computes B/N samples at its own pace, then pushes and pulls: what is its "
            "rate? Add up the rates of all workers",
        )
    c.expect(True, "the result is the sum of the workers' own rates", "")


@exercise("9.4", "Case A, blind", where="the engines", cell="the notebook")
def case_a(c: Check) -> None:
    """Check the seal, the prediction and the choice of the played case."""
    _played(c, "A")


@exercise("9.5", "Case B, blind", where="the engines", cell="the notebook")
def case_b(c: Check) -> None:
    """Check the seal, the prediction and the choice of the played case."""
    _played(c, "B")


def _played(c: Check, name: str) -> None:
    play = c.play(name)
    student = str(play.get("student") or "") if play is not None else ""
    if play is None or not play["strategy"]:
        hint = "set `strategy` and `samples_per_s` before blind.seal, and run the cell"
        if student:
            c.wrong(
                f"Case {name} of {student!r} has no sealed prediction yet.",
                f'{hint}; if {student!r} is not your name, run blind.play_as("your name") first',
            )
        c.wrong(f"Case {name} has no sealed prediction yet.", hint)
    c.need(
        bool(student),
        f"Case {name} belongs to no student, because it was opened without a name.",
        "in the cell of this exercise, set `student` to your name, and open the case with "
        f'blind.case("{name}", student)',
    )
    attempt = int(play["attempt"])
    own = draw(seed_of(student), name, attempt)
    c.need(
        list(play["numbers"]) == own.numbers,
        f"The numbers of case {name} depend on the student's name. The numbers of this case {name} "
        f"are not those of the student {student!r}.",
        f'take the case from blind.case("{name}", student), and do not change it',
    )
    strategy, predicted = str(play["strategy"]), float(play["predicted"])
    measured = {str(key): float(rate) for key, rate in dict(play["measured"]).items()}
    c.need(
        strategy in STRATEGIES and set(measured) == set(STRATEGIES),
        f"Your prediction for case {name} is sealed, but the case was not run to its end.",
        "call blind.run(case): it runs your strategy and the other three",
    )
    if not c.expect(
        play["honest"] is True,
        f"the prediction was sealed before the case was run (attempt {attempt + 1} at case {name})",
        "the prediction was sealed after the case had been run",
        f'blind.case("{name}") begins a new attempt: probe, predict, seal, and only then run',
    ):
        return
    factor = predicted / measured[strategy]
    c.expect(
        1 / PREDICTED <= factor <= PREDICTED,
        f"the prediction is within a factor of {PREDICTED:g} of the measured value",
        f"{predicted:.3g} samples/s were predicted for {strategy}, but "
        f"{measured[strategy]:.3g} samples/s were measured",
        "did you leave out the messages, or a worker that is slower than the other workers?"
        if factor > 1
        else "did you count a time twice, or use a unit that is not samples per second?",
    )
    rates = expected(own)
    share, seen = choice_score(strategy, rates), choice_score(strategy, measured)
    c.expect(
        share >= ENOUGH,
        f"by the formulae of section 1, the chosen strategy achieves at least {ENOUGH:.0%} of the "
        "rate of the best strategy",
        f"by the formulae of section 1, {strategy} achieves {share:.0%} of the rate of the best "
        f"strategy, but at least {ENOUGH:.0%} is needed. In the runs, {strategy} achieved "
        f"{seen:.0%} of the best measured rate",
        "with the probes, find `t1_s`, `latency_s` and `bytes_per_s` of this case. Then predict "
        "the rates of all four strategies, and compare these rates before you choose",
    )


MEMORY = ("one_device", "mirrored", "central_storage", "parameter_server", "sharded", "model_split")

_UNITS = (1e3, 1e6, 1e9, 2**10, 2**20, 2**30)
"""The bytes of a kB, MB, GB, KiB, MiB and GiB."""


def _held(strategy: str, parameters: float, workers: int) -> float:
    """Return the bytes that a worker of a strategy holds, with float32 and Adam."""
    if strategy in ("central_storage", "parameter_server"):
        return 8 * parameters
    return 16 * parameters / (workers if strategy in ("sharded", "model_split") else 1)


@exercise("9.6", "Case M: what fits into the memory")
def fitting(c: Check) -> None:
    """Call `held_bytes` for six strategies and several clusters, and check `choice`."""
    hints = {
        "central_storage": "the optimizer's state is on the server (lab 4)",
        "parameter_server": "the optimizer's state is on the server (lab 4)",
        "sharded": "each worker holds its part of the parameters, gradients and optimizer state",
        "model_split": "each worker holds only its own stage (lab 6)",
    }
    for strategy in MEMORY:
        for parameters, workers in ((6_291_456, 3), (1_000_000, 2), (70_000_000_000, 64)):
            found = c.number_from("held_bytes", strategy, parameters, workers)
            held = _held(strategy, parameters, workers)
            hint = hints.get(strategy, "each worker holds everything that training with Adam needs")
            if any(math.isclose(found * unit, held, rel_tol=1e-3) for unit in _UNITS):
                hint = "return the number in bytes, not in a larger unit such as MiB"
            c.need(
                math.isclose(found, held, rel_tol=1e-3),
                f"held_bytes({strategy!r}, {parameters}, {workers}) returned {found:.4g}. This is "
                "not the number of bytes that one worker holds.",
                hint,
            )
    c.expect(True, "`held_bytes` returns the right number of bytes for all six strategies", "")
    choice = c.text("choice", MEMORY)
    c.expect(
        choice == "model_split",
        "the chosen strategy fits into 40 MiB, and sends the fewest bytes",
        f"{choice!r} is not the strategy that fits into 40 MiB and sends the fewest bytes",
        "first exclude each strategy that does not fit into 40 MiB, then count the bytes that each "
        "remaining strategy sends in a step",
    )


def _settled(run: Any, column: str) -> float:
    """Return the median of a column after warm-up."""
    history = run.history
    return float(np.median(history[column][history["step"] >= WARM_UP]))


@exercise("9.7", "A case without simulation")
def unsimulated(c: Check) -> None:
    """Compare `miss`, both excess times and `why` with the runs `real-1` and `real-2`."""
    alone, together = c.run("real-1"), c.run("real-2")
    facts = c.value("real_facts")
    c.need(
        isinstance(facts, dict) and facts.get("workers") == 2,
        "`real_facts` is not the dictionary of section 6.",
        "run the cells of section 6 in order",
    )
    predicted = c.number_from("rate", "mirrored", facts)
    message_s = facts["latency_s"] + facts["size_bytes"] / 2 / facts["bytes_per_s"]
    c.need(
        math.isclose(predicted, facts["batch"] / (facts["t1_s"] / 2 + 2 * message_s), rel_tol=1e-3),
        f"rate('mirrored', real_facts) returned {predicted:.4g}, which is not the rate that "
        "the formulae of section 1 give.",
        "first solve exercise 9.2, because exercise 9.7 uses the function `rate`",
    )
    step_s, compute_s = _settled(together, "step_s"), _settled(together, "compute_s")
    share_s = _settled(alone, "step_s") / 2
    extra = {
        "compute": compute_s - share_s,
        "messages": step_s - compute_s - (facts["batch"] / predicted - share_s),
    }
    found = c.number_of("miss")
    c.expect(
        math.isclose(found, predicted / (facts["batch"] / step_s), rel_tol=0.05),
        "`miss` is the predicted rate divided by the measured rate",
        f"`miss` is {found:.3g}, which does not agree with the runs `real-1` and `real-2`",
        'the measured rate is real_facts["batch"] divided by settled("real-2", "step_s")',
    )
    for term, truth in extra.items():
        value = c.number_of(f"extra_{term}_s")
        c.expect(
            abs(value - truth) <= 0.05 * step_s,
            f"`extra_{term}_s` is the measured time of the part {term!r} minus its predicted time",
            f"`extra_{term}_s` is {value * 1e3:.3g} ms, which does not agree with the runs "
            "`real-1` and `real-2`",
            f"take the measured time of the part {term!r}, and subtract the predicted time of this "
            "part",
        )
    why = c.text("why", tuple(extra))
    c.expect(
        why == max(extra, key=extra.__getitem__),
        "`why` is the part of the step with the larger extra time",
        f"`why` is {why!r}, which is not the part with the larger extra time",
        "which number is larger, `extra_compute_s` or `extra_messages_s`?",
    )
