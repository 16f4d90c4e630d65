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
"""Frameworks whose workers find each other through the keeper's store."""

# Arguments of `wb.fit` that some strategies do not support; all others work everywhere.
FIT_FEATURES = frozenset(
    {
        "step_fn", "eval_data", "metrics", "scheduler", "clip_norm", "accumulate",
        "precision", "compile", "callbacks", "uneven_batches", "built_optimizer",
        "sparse_gradients", "own_data",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One `-o name=value` of a strategy.

    Attributes:
        pattern: For text: the regular expression that the whole value must match; `form` describes
            it in words.
        only_with: Another option (name, value) that this one needs; otherwise it has no effect.
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
            PlanError: The value has the wrong type or is out of range.
        """
        if self.optional and (text is None or str(text).lower() == "none"):
            return None
        try:
            value = self._convert(text)
        except (ValueError, KeyError):
            raise PlanError(
                f"The value of option `{self.name}` is not valid.",
                seen=text,
                allowed=self.allowed,
                code="WB-PLAN-002",
            ) from None
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise PlanError(
                f"The value of option `{self.name}` is not valid.",
                seen=text,
                allowed=self.allowed,
                code="WB-PLAN-003",
            )
        if self.kind == "choice" and value not in self.choices:
            raise unknown(f"value of option `{self.name}`", str(value), self.choices)
        low, high = self.minimum, self.maximum
        if isinstance(value, (int, float)) and (
            (low is not None and value < low) or (high is not None and value > high)
        ):
            nearest = low if low is not None and value < low else high
            raise PlanError(
                f"The value of option `{self.name}` is out of range.",
                seen=value, allowed=self.allowed,
                next_step=f"use -o {self.name}={nearest:g}, or remove the option",
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
        """Whether its value is text that can contain commas."""
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
        two = self.kind == "int" and self.minimum is not None and self.maximum == self.minimum + 1
        if two:
            text = f"{self.minimum:g} or {self.maximum:g}"
        elif self.minimum is not None and self.maximum is not None:
            text += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            text += f", at least {self.minimum:g}"
        elif self.maximum is not None:
            text += f", at most {self.maximum:g}"
        return text + (", or `none`" if self.optional else "")


def chained(parts: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """Return which servers hold each part; the servers form a ring of the needed size.

    Part 0 is on s0 and s1, part 1 on s1 and s2, the last part on its own server and s0. If there
    are fewer parts than copies, additional servers hold only copies.
    """
    count = max(parts, copies)
    return tuple(
        tuple((part + further) % count for further in range(copies)) for part in range(parts)
    )


@dataclass(frozen=True)
class Strategy:
    """A strategy: how it divides the computation and the parameters among workers.

    Attributes:
        name: What the user types.
        framework: The framework of this entry; a name can have an entry in each framework.
        term: The field's standard term.
        summary: One line, for lists and cards.
        module: `package.module:Class`, imported by engines only.
        sync: Whether it is synchronous. Tests compare such strategies with one device, and their
            workers stop at the same step.
        data_parallel: Whether workers take shares of the batch (throughput is summed over them).
        ways: How it can be used.
        supports: Arguments of `wb.fit` (of FIT_FEATURES) that it honours.
        max_workers: The highest number of workers; None if there is no limit.
        servers: How many servers it always needs.
        servers_option: Name of the option that says how many servers it needs instead.
        copies_option: Name of the option that says how many servers hold each part.
        sync_option: Name of the option that makes an asynchronous strategy synchronous.
        cadence: When the workers step together, in words, if they do so only in part.
        excludes: Pairs of options, and why only one of the pair can differ from its default.
        links: Whether it has its own links; bandwidth and latency can be simulated on them.
        one_engine: Whether one engine runs the cell, whatever the number of replicas.
        remote_workers: Whether that engine only gives out steps, and each worker is another engine.
        replicated: Whether each worker holds all of the model and of the optimizer's state between
            steps, so that a run can continue from the state of any surviving worker.
        heals: Whether a training of `wb.fit` continues without a restart when a worker dies. No
            step is repeated, only what `dies_with` says is lost, and a new worker joins when it has
            started.
        sheds: Whether a worker that stays slow can get a smaller share of each batch. Shares are
            weighted by their samples, so the result is the same.
        dies_with: The most that is lost with such a worker; empty if nothing is lost.
        copy_rule: `package.module:function` of (options, workers), pure: how many workers hold a
            copy of the model together; empty: one.
        unhealed: Why it does not heal.
        unhealed_with: Options (name, value) with which it does not heal.
        spares_workers: Whether the other workers continue without a pause when a worker dies. They
            do if they wait for no worker and the dead one is not rank 0, which evaluates and saves.
            The rest of the dead worker's steps is lost.
        whole: Whether every worker has the whole model at the end. Otherwise each has a part, and
            builds only this part if the model is given as a function.
        keeps: What a worker holds between steps: `all` of weights, gradients and optimizer state;
            `weights` and gradients, while servers hold the state; or its `part` of everything.
        fills: Whether each worker fills its part of a model without memory (device `meta`) with
            weights. Of a model given as a function, only rank 0 builds the real one.
        loses: The maximum loss when a run continues from its last checkpoint.
        rules: `package.module:function` of (options, workers, batch size or None), pure: raises
            PlanError if options do not fit each other, before an engine does anything.
        messages: `package.module:function` of a `messages.Layout`, pure: what a step sends to whom.
        takes_turns: Whether workers depend on each other's results within a step, so that a slow
            worker causes bubbles in the others instead of a wait at the step's end.
        exact_with: Options (name, value) with which several workers give the result of one device,
            up to rounding. None: no options do. Empty: the result is always exact.
        linear_only: Whether this is true only for optimizers linear in the gradient (SGD,
            momentum).
        needs_gpus: Options (name, value) that need a GPU per replica.
        shares_gpu: Whether workers can share a GPU. They can if messages go through the host, or
            are broadcasts and sums, which gloo can do with GPU tensors.
        anywhere: Whether it runs on a machine without special devices.
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
    cadence: str = ""
    excludes: tuple[tuple[str, str, str], ...] = ()
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
        """Whether these options give the result of one device, up to rounding."""
        if self.exact_with is None or not self.is_sync(options):
            return False
        return all(options.get(name) == value for name, value in self.exact_with)

    def copy_workers(self, options: dict[str, Any], workers: int) -> int:
        """Return how many workers hold a copy of the model together.

        Rank r has part r modulo this number.
        """
        if not self.copy_rule:
            return 1
        module, _, rule = self.copy_rule.partition(":")
        return int(getattr(importlib.import_module(module), rule)(options, workers))

    def part_count(self, options: dict[str, Any]) -> int:
        """Return into how many parts these options divide the parameters on the servers."""
        return int(options[self.servers_option]) if self.servers_option else self.servers

    def server_count(self, options: dict[str, Any]) -> int:
        """Return how many servers a run needs: one per part, and each copy on another server."""
        parts = self.part_count(options)
        return max(parts, self._copies(options)) if parts else 0

    def chains(self, options: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Return which servers hold each part: its own server, then those with copies."""
        return chained(self.part_count(options), self._copies(options))

    def _copies(self, options: dict[str, Any]) -> int:
        return int(options.get(self.copies_option, 1)) if self.copies_option else 1

    def helpers(self, options: dict[str, Any], workers: int) -> tuple[str, ...]:
        """Return the names of the engines that a run needs in addition to the cell's engines."""
        remote = [f"worker {rank}" for rank in range(workers)] if self.remote_workers else []
        return (*remote, *(f"server s{index}" for index in range(self.server_count(options))))

    def option(self, name: str, others: Iterable[Strategy] = ()) -> Option:
        """Return the option with this name.

        Args:
            others: Strategies that the error names if they have the option.

        Raises:
            PlanError: The strategy has no such option.
        """
        for option in self.options:
            if option.name == name:
                return option
        elsewhere = [e.name for e in others if any(o.name == name for o in e.options)]
        if elsewhere:
            raise PlanError(
                f"Strategy {self.name} has no option `{name}`. This option belongs to "
                f"{', '.join(dict.fromkeys(elsewhere))}.",
                seen=name,
                allowed=", ".join(option.name for option in self.options) or "no options",
                next_step=f"use %%distributed {elsewhere[0]} -o {name}=..., or remove -o {name}",
                code="WB-PLAN-005",
            )
        if not self.options:
            raise PlanError(f"Strategy {self.name} has no options.", seen=name, code="WB-PLAN-006")
        raise unknown(
            f"option of strategy {self.name}", name, [option.name for option in self.options]
        )

    def settings(self, given: dict[str, Any], others: Iterable[Strategy] = ()) -> dict[str, Any]:
        """Return the value of every option: given values parsed, the others by default.

        Args:
            others: As `option` takes them.

        Raises:
            PlanError: An option is unknown or invalid, excludes another option, or needs another
                option.
        """
        parsed = {name: self.option(name, others).parse(value) for name, value in given.items()}
        values = {option.name: parsed.get(option.name, option.default) for option in self.options}
        for *pair, why in self.excludes:
            if all(values[name] != self.option(name).default for name in pair):
                raise PlanError(
                    f"Options `{pair[0]}` and `{pair[1]}` of {self.name} cannot be used together, "
                    f"because {why}.",
                    seen=", ".join(f"{name}={values[name]}" for name in pair),
                    next_step="remove one of the two options",
                    code="WB-PLAN-007",
                )
        for option in self.options:
            if option.only_with is None or values[option.name] == option.default:
                continue
            other, needed = option.only_with
            if values[other] != needed:
                raise PlanError(
                    f"Option `{option.name}` of {self.name} has an effect only if "
                    f"{other}={needed}.",
                    seen=f"{option.name}={values[option.name]}, {other}={values[other]}",
                    next_step=f"add -o {other}={needed}, or remove -o {option.name}",
                    code="WB-PLAN-318",
                )
        return values
