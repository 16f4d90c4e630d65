"""Every strategy as data: names, options, roles, what it can do, where it is described.

No code lives here and nothing is imported but the errors, so the kernel, the engines, the
documentation and the tests read the same table. To add a strategy, add one entry here and one
file under `strategies/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from .errors import PlanError, unknown

Framework = Literal["torch", "tensorflow"]
Way = Literal["fit", "prepare", "keras", "loop"]

FRAMEWORKS: tuple[Framework, ...] = ("torch", "tensorflow")

# Arguments of `wb.fit` that a strategy may be unable to honour; the others work everywhere.
FIT_FEATURES = frozenset(
    {
        "step_fn", "eval_data", "metrics", "scheduler", "clip_norm", "accumulate",
        "precision", "compile", "callbacks", "uneven_batches", "built_optimizer",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One `-o name=value` of a strategy."""

    name: str
    kind: Literal["int", "float", "bool", "choice", "str"]
    default: Any
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

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
                f"Option {self.name} was not understood.", seen=text, allowed=self.allowed
            ) from None
        if self.kind == "choice" and value not in self.choices:
            raise unknown(f"value for option {self.name}", str(value), self.choices)
        low, high = self.minimum, self.maximum
        if isinstance(value, (int, float)) and (
            (low is not None and value < low) or (high is not None and value > high)
        ):
            raise PlanError(
                f"Option {self.name} is out of range.", seen=value, allowed=self.allowed
            )
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
        return str(text)

    @property
    def allowed(self) -> str:
        """What the option accepts, in words."""
        if self.kind == "choice":
            return ", ".join(self.choices)
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
        servers_option: Name of the option that says how many servers it needs.
        one_engine: Whether one engine holds all replicas.
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
    servers_option: str | None = None
    one_engine: bool = False

    def option(self, name: str) -> Option:
        """Return the option of that name.

        Raises:
            PlanError: The strategy has no such option.
        """
        for option in self.options:
            if option.name == name:
                return option
        if not self.options:
            raise PlanError(f"Strategy {self.name} takes no options.", seen=name)
        raise unknown(f"option of {self.name}", name, [option.name for option in self.options])

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return every option's value: the given ones parsed, the others at their defaults."""
        parsed = {name: self.option(name).parse(value) for name, value in given.items()}
        return {option.name: parsed.get(option.name, option.default) for option in self.options}


CATALOG: tuple[Strategy, ...] = (
    Strategy(
        name="one_device",
        framework="torch",
        term="single-device training",
        summary="One worker does all the work; the yardstick every other strategy is held against.",
        module="workbench.strategies.torch.one_device:OneDevice",
        suits="models that fit one device, and as the baseline of every comparison",
        source="Robbins and Monro, A Stochastic Approximation Method, 1951",
        max_workers=1,
    ),
    Strategy(
        name="mirrored",
        framework="torch",
        term="synchronous data parallelism (all-reduce)",
        summary="Each worker holds a copy and takes a share of the batch; gradients are averaged.",
        module="workbench.strategies.torch.mirrored:Mirrored",
        suits="models that fit one device, with steps long enough to hide an all-reduce",
        source="Li et al., PyTorch Distributed, VLDB 2020, section 3",
        aliases=("ddp", "data_parallel"),
        options=(
            Option(
                "bucket_mb", "float", 25.0, minimum=0.001, maximum=4096,
                help="size of the gradient buckets that are reduced while backward still runs",
            ),
            Option(
                "find_unused_parameters", "bool", False,
                help="search each step for parameters that took no part in the loss (slower)",
            ),
            Option(
                "sync_batchnorm", "bool", False,
                help="compute BatchNorm statistics over all workers (CUDA devices only)",
            ),
        ),
    ),
)  # fmt: skip


def strategies(framework: str | None = None) -> list[Strategy]:
    """Return the entries of the catalog, those of one framework where it is given."""
    return [entry for entry in CATALOG if framework in (None, entry.framework)]


def names(framework: str | None = None) -> list[str]:
    """Return the names that `%%distributed` accepts, without aliases."""
    return list(dict.fromkeys(entry.name for entry in strategies(framework)))


def lookup(name: str, framework: str = "torch") -> Strategy:
    """Return the entry for a name or alias.

    Raises:
        PlanError: No strategy has that name, or the framework has none of that name.
    """
    if framework not in FRAMEWORKS:
        raise unknown("framework", framework, FRAMEWORKS)
    for entry in strategies(framework):
        if name == entry.name or name in entry.aliases:
            return entry
    elsewhere = [e.framework for e in CATALOG if name == e.name or name in e.aliases]
    if elsewhere:
        raise PlanError(
            f"Strategy {name} is not available for {framework}.",
            allowed=", ".join(names(framework)) or f"no strategy has a {framework} version yet",
            next_step=f"use --framework {elsewhere[0]}",
        )
    every = [*names(framework), *(a for e in strategies(framework) for a in e.aliases)]
    raise unknown("strategy", name, every, next_step="wb.strategies() describes them all")
