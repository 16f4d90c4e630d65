"""What an entry of the catalog says: the types of a strategy and of its options."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import PlanError, unknown

Framework = Literal["torch", "tensorflow"]
Way = Literal["fit", "prepare", "keras", "loop"]

FRAMEWORKS: tuple[Framework, ...] = ("torch", "tensorflow")
MEET_IN_STORE = frozenset({"torch"})
"""Frameworks whose workers find each other in the keeper's store."""

# Arguments of `wb.fit` that a strategy may be unable to honour; the others work everywhere.
FIT_FEATURES = frozenset(
    {
        "step_fn", "eval_data", "metrics", "scheduler", "clip_norm", "accumulate",
        "precision", "compile", "callbacks", "uneven_batches", "built_optimizer",
        "sparse_gradients",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One `-o name=value` of a strategy.

    Attributes:
        pattern: For text: the regular expression it must match as a whole; `form` says it in words.
        only_with: Another option (name, value) without which this one means nothing.
    """

    name: str
    kind: Literal["int", "float", "bool", "choice", "str"]
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    pattern: str = ""
    form: str = ""
    only_with: tuple[str, Any] | None = None

    def parse(self, text: object) -> Any:
        """Turn what the user wrote into a value.

        Raises:
            PlanError: It is of the wrong type or out of range.
        """
        if self.optional and (text is None or str(text).lower() == "none"):
            return None
        try:
            value = self._convert(text)
        except (ValueError, KeyError):
            raise PlanError(
                f"Option {self.name} is not valid.",
                seen=text,
                allowed=self.allowed,
                code="WB-PLAN-002",
            ) from None
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise PlanError(
                f"Option {self.name} is not valid.",
                seen=text,
                allowed=self.allowed,
                code="WB-PLAN-003",
            )
        if self.kind == "choice" and value not in self.choices:
            raise unknown(f"value for option {self.name}", str(value), self.choices)
        low, high = self.minimum, self.maximum
        if isinstance(value, (int, float)) and (
            (low is not None and value < low) or (high is not None and value > high)
        ):
            nearest = low if low is not None and value < low else high
            raise PlanError(
                f"Option {self.name} is out of range.", seen=value, allowed=self.allowed,
                next_step=f"-o {self.name}={nearest:g}, or remove it",
                code="WB-PLAN-004",
            )  # fmt: skip
        return value

    def _convert(self, text: object) -> Any:
        if self.kind == "bool":
            table = {"true": True, "1": True, "yes": True, "on": True}
            table |= {"false": False, "0": False, "no": False, "off": False}
            return table[str(text).lower()]
        if self.kind == "int":
            return int(str(text))
        if self.kind == "float":
            value = float(str(text))
            if not math.isfinite(value):
                raise ValueError(text)
            return value
        return str(text).strip()  # as the line reads it

    @property
    def holds_commas(self) -> bool:
        """Whether its value is text that may hold commas."""
        return self.kind == "str" and not self.pattern

    @property
    def allowed(self) -> str:
        """What the option accepts, in words."""
        if self.kind == "choice":
            return ", ".join(self.choices)
        if self.form:
            return self.form
        words = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "text",
        }
        text = words[self.kind]
        if self.minimum is not None and self.maximum is not None:
            text += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            text += f", at least {self.minimum:g}"
        elif self.maximum is not None:
            text += f", at most {self.maximum:g}"
        return text + (" or none" if self.optional else "")


def chained(parts: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Return which servers hold each part, on a ring of as many servers as that takes.

    Part 0 is on s0 and s1, part 1 on s1 and s2, the last one on its own server and s0. Where there
    are fewer parts than copies, further servers hold copies alone.
    """
    count = max(parts, copies)
    return tuple(
        tuple((part + further) % count for further in range(copies)) for part in range(parts)
    )


@dataclass(frozen=True)
class Strategy:
    """How the work and the parameters are laid out.

    Attributes:
        name: What the user types.
        framework: The framework this entry is for; a name may have an entry in each.
        term: The field's standard term.
        summary: One line, for lists and cards.
        module: `package.module:Class`, imported by engines only.
        sync: Synchronous strategies are proved equal to one device and stop at an agreed step.
        data_parallel: Whether workers take shares of the batch (throughput is summed over them).
        ways: How it can be used.
        supports: Arguments of `wb.fit` (of FIT_FEATURES) that it honours.
        max_workers: Most workers it can use; None where there is no limit.
        servers: Servers it always needs.
        servers_option: Name of the option that says how many servers it needs instead.
        copies_option: Name of the option that says how many servers hold each part.
        sync_option: Name of the option that makes an asynchronous strategy synchronous.
        excludes: Pairs of options of which only one may differ from its default.
        links: Whether it has its own links, on which bandwidth and latency can be simulated.
        one_engine: Whether one engine runs the cell, whatever the number of replicas.
        remote_workers: Whether that engine only gives out work, and each worker is another engine.
        replicated: Whether each worker holds all of the model and of the optimizer's state between
            steps, so that a run goes on from what a survivor has.
        heals: Whether a training of `wb.fit` continues without a restart when a worker dies, with
            nothing done again and nothing lost but what `dies_with` says, and with a fresh worker
            as soon as there is one.
        sheds: Whether a worker that is slow for long can have a smaller share of each batch: shares
            are weighted by their samples, so the result is the same.
        dies_with: What is lost with a worker then, at most; empty where nothing is.
        copy_rule: `package.module:function` of (options, workers), pure: how many workers hold a
            copy of the model together; empty: one.
        unhealed: Why it does not.
        unhealed_with: Options (name, value) under which it does not.
        spares_workers: Whether the others go on without a pause when a worker dies, as long as they
            wait for nobody and it is not rank 0, which evaluates and saves. The rest of its share
            of the steps is lost.
        whole: Whether every worker ends with the whole model; else each has its share of it, and
            builds no more than that where the model is given as a function.
        keeps: What a worker holds between steps: `all` of weights, gradients and optimizer state;
            `weights` and gradients, while servers hold the state; or its `part` of everything.
        fills: Whether it gives a model without memory (device `meta`) its weights, each worker its
            part of them; one given as a function is built for real by rank 0 alone.
        loses: The maximum loss when a run continues from its last checkpoint.
        rules: `package.module:function` of (options, workers, batch size or None), pure: raises
            PlanError where options do not fit each other, before an engine is touched.
        messages: `package.module:function` of a `messages.Layout`, pure: what a step sends to whom.
        takes_turns: Whether workers depend on each other's results within a step, so that a slow
            one shows as the others' bubble rather than as a wait at the step's end.
        exact_with: Options (name, value) under which several workers give what one device gives,
            up to rounding; None where none do. Empty for what is always exact.
        linear_only: Whether that holds only for optimizers linear in the gradient (SGD, momentum).
        needs_gpus: Options (name, value) that need a GPU per replica.
        shares_gpu: Whether workers can share a GPU: what they send is broadcast or added up, which
            gloo can do with GPU tensors, or goes through the host.
        anywhere: Whether a machine without special devices can run it.
        source: Where the algorithm is described.
    """

    name: str
    framework: Framework
    term: str
    summary: str
    module: str
    suits: str
    source: str
    sync: bool = True
    data_parallel: bool = True
    ways: tuple[Way, ...] = ("fit", "prepare")
    supports: frozenset[str] = FIT_FEATURES
    options: tuple[Option, ...] = ()
    aliases: tuple[str, ...] = ()
    max_workers: int | None = None
    servers: int = 0
    servers_option: str | None = None
    copies_option: str | None = None
    sync_option: str | None = None
    excludes: tuple[tuple[str, str], ...] = ()
    links: bool = False
    one_engine: bool = False
    remote_workers: bool = False
    replicated: bool = False
    heals: bool = False
    sheds: bool = False
    dies_with: str = ""
    copy_rule: str = ""
    unhealed: str = ""
    unhealed_with: tuple[tuple[str, Any], ...] = ()
    spares_workers: bool = False
    whole: bool = True
    keeps: Literal["all", "weights", "part"] = "all"
    fills: bool = False
    loses: str = "the steps since the last checkpoint"
    rules: str = ""
    messages: str = ""
    takes_turns: bool = False
    exact_with: tuple[tuple[str, Any], ...] | None = ()
    linear_only: bool = False
    needs_gpus: tuple[tuple[str, Any], ...] = ()
    shares_gpu: bool = False
    anywhere: bool = True

    def is_sync(self, options: dict[str, Any]) -> bool:
        """Whether workers take each step together, under these options."""
        return self.sync or bool(self.sync_option and options.get(self.sync_option))

    def is_exact(self, options: dict[str, Any]) -> bool:
        """Whether it trains what one device trains, up to rounding, under these options."""
        if self.exact_with is None or not self.is_sync(options):
            return False
        return all(options.get(name) == value for name, value in self.exact_with)

    def copy_workers(self, options: dict[str, Any], workers: int) -> int:
        """Return how many workers hold a copy of the model together: r has part r modulo that."""
        if not self.copy_rule:
            return 1
        module, _, rule = self.copy_rule.partition(":")
        return int(getattr(importlib.import_module(module), rule)(options, workers))

    def part_count(self, options: dict[str, Any]) -> int:
        """Return in how many parts servers hold the parameters, under these options."""
        return int(options[self.servers_option]) if self.servers_option else self.servers

    def server_count(self, options: dict[str, Any]) -> int:
        """Return how many servers a run needs: one a part, and no two copies on one."""
        parts = self.part_count(options)
        return max(parts, self._copies(options)) if parts else 0

    def chains(self, options: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Return which servers hold each part: its own first, then those with copies."""
        return chained(self.part_count(options), self._copies(options))

    def _copies(self, options: dict[str, Any]) -> int:
        return int(options.get(self.copies_option, 1)) if self.copies_option else 1

    def helpers(self, options: dict[str, Any], workers: int) -> tuple[str, ...]:
        """Return what the engines are called that a run needs besides those that run the cell."""
        remote = [f"worker {rank}" for rank in range(workers)] if self.remote_workers else []
        return (*remote, *(f"server s{index}" for index in range(self.server_count(options))))

    def option(self, name: str, others: Iterable[Strategy] = ()) -> Option:
        """Return the option of that name.

        Args:
            others: Strategies that are named if the option is one of theirs.

        Raises:
            PlanError: The strategy has no such option.
        """
        for option in self.options:
            if option.name == name:
                return option
        elsewhere = [e.name for e in others if any(o.name == name for o in e.options)]
        if elsewhere:
            raise PlanError(
                f"Strategy {self.name} has no option {name}. It is an option of "
                f"{', '.join(dict.fromkeys(elsewhere))}.",
                seen=name,
                allowed=", ".join(option.name for option in self.options) or "no options",
                next_step=f"%%distributed {elsewhere[0]} -o {name}=...",
                code="WB-PLAN-005",
            )
        if not self.options:
            raise PlanError(
                f"Strategy {self.name} takes no options.", seen=name, code="WB-PLAN-006"
            )
        raise unknown(f"option of {self.name}", name, [option.name for option in self.options])

    def settings(self, given: dict[str, Any], others: Iterable[Strategy] = ()) -> dict[str, Any]:
        """Return every option's value: the given ones parsed, the others at their defaults.

        Args:
            others: As `option` takes them.

        Raises:
            PlanError: An option is unknown, was not understood, excludes another one, or means
                nothing without another one.
        """
        parsed = {name: self.option(name, others).parse(value) for name, value in given.items()}
        values = {option.name: parsed.get(option.name, option.default) for option in self.options}
        for pair in self.excludes:
            if all(values[name] != self.option(name).default for name in pair):
                raise PlanError(
                    f"Options {pair[0]} and {pair[1]} of {self.name} cannot be combined.",
                    seen=", ".join(f"{name}={values[name]}" for name in pair),
                    next_step="remove one of them",
                    code="WB-PLAN-007",
                )
        for option in self.options:
            if option.only_with is None or values[option.name] == option.default:
                continue
            other, needed = option.only_with
            if values[other] != needed:
                raise PlanError(
                    f"Option {option.name} of {self.name} has an effect only with "
                    f"{other}={needed}.",
                    seen=f"{option.name}={values[option.name]}, {other}={values[other]}",
                    next_step=f"-o {other}={needed}, or remove {option.name}",
                    code="WB-PLAN-318",
                )
        return values
