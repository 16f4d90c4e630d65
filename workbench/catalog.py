"""Every strategy as data: names, options, roles, what it can do, where it is described.

No code lives here and nothing is imported but the errors, so the kernel, the engines, the
documentation and the tests read the same table. To add a strategy, add one entry here and one
file under `strategies/`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from .errors import PlanError, unknown

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
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise PlanError(
                f"Option {self.name} was not understood.", seen=text, allowed=self.allowed
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
                next_step=f"-o {self.name}={nearest:g}, or leave it out",
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
        return str(text)

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
        sync_option: Name of the option that makes an asynchronous strategy synchronous.
        excludes: Pairs of options of which only one may differ from its default.
        links: Whether it has links of its own, on which bandwidth and latency can be simulated.
        one_engine: Whether one engine runs the cell, whatever the number of replicas.
        remote_workers: Whether that engine only hands out work: each worker is a further engine.
        whole: Whether every worker ends with the whole model; else each has its share of it, and
            builds no more than that where the model is given as a function.
        rules: `package.module:function` of (options, workers, batch size or None), pure: raises
            PlanError where options do not fit each other, before an engine is touched.
        takes_turns: Whether workers depend on each other's results within a step, so that a slow
            one shows as the others' bubble rather than as a wait at the step's end.
        exact_with: Options (name, value) under which several workers give what one device gives,
            up to rounding; None where none do. Empty for what is always exact.
        linear_only: Whether that holds only for optimizers linear in the gradient (SGD, momentum).
        needs_gpus: Options (name, value) that need a GPU per replica.
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
    sync_option: str | None = None
    excludes: tuple[tuple[str, str], ...] = ()
    links: bool = False
    one_engine: bool = False
    remote_workers: bool = False
    whole: bool = True
    rules: str = ""
    takes_turns: bool = False
    exact_with: tuple[tuple[str, Any], ...] | None = ()
    linear_only: bool = False
    needs_gpus: tuple[tuple[str, Any], ...] = ()
    anywhere: bool = True

    def is_sync(self, options: dict[str, Any]) -> bool:
        """Whether workers take each step together, under these options."""
        return self.sync or bool(self.sync_option and options.get(self.sync_option))

    def server_count(self, options: dict[str, Any]) -> int:
        """Return how many servers a run needs, under these options."""
        return int(options[self.servers_option]) if self.servers_option else self.servers

    def helpers(self, options: dict[str, Any], workers: int) -> tuple[str, ...]:
        """Return what the engines are called that a run needs besides those that run the cell."""
        remote = [f"worker {rank}" for rank in range(workers)] if self.remote_workers else []
        return (*remote, *(f"server s{index}" for index in range(self.server_count(options))))

    def option(self, name: str) -> Option:
        """Return the option of that name.

        Raises:
            PlanError: The strategy has no such option.
        """
        for option in self.options:
            if option.name == name:
                return option
        elsewhere = [e.name for e in CATALOG if any(o.name == name for o in e.options)]
        if elsewhere:
            raise PlanError(
                f"Strategy {self.name} has no option {name}: that is one of "
                f"{', '.join(dict.fromkeys(elsewhere))}.",
                seen=name,
                allowed=", ".join(option.name for option in self.options) or "no options",
                next_step=f"%%distributed {elsewhere[0]} -o {name}=...",
            )
        if not self.options:
            raise PlanError(f"Strategy {self.name} takes no options.", seen=name)
        raise unknown(f"option of {self.name}", name, [option.name for option in self.options])

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return every option's value: the given ones parsed, the others at their defaults.

        Raises:
            PlanError: An option is unknown, was not understood, or excludes another one.
        """
        parsed = {name: self.option(name).parse(value) for name, value in given.items()}
        values = {option.name: parsed.get(option.name, option.default) for option in self.options}
        for pair in self.excludes:
            if all(values[name] != self.option(name).default for name in pair):
                raise PlanError(
                    f"Options {pair[0]} and {pair[1]} of {self.name} exclude each other.",
                    seen=", ".join(f"{name}={values[name]}" for name in pair),
                    next_step="leave one of them out",
                )
        return values


# topk's fraction: above 0, at most 1; an exponent is always negative.
_FRACTION = r"1(\.0*)?|0?\.0*[1-9]\d*|[1-9](\.\d+)?e-\d+"
COMPRESSIONS = rf"none|fp16|bf16|powersgd:0*[1-9]\d*|topk:({_FRACTION})"

_PIPELINE_OPTIONS = (
    Option(
        "schedule", "choice", "1f1b",
        choices=("naive", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        help="the order of microbatches; naive passes the whole batch from stage to stage",
    ),
    Option(
        "microbatches", "int", None, minimum=1, maximum=4096, optional=True,
        help="parts a batch is cut into; none: two per worker (one for naive)",
    ),
    Option(
        "stages_per_worker", "int", None, minimum=1, maximum=64, optional=True,
        help="stages each worker holds (interleaved: 2 unless given; zero_bubble: 1)",
    ),
    Option(
        "split_at", "str", None, optional=True,
        help="layers that begin a stage, by name or number: 2,5 or conv2,fc1; none: "
        "balanced from measured times",
    ),
)  # fmt: skip

_TENSORFLOW_WAYS: tuple[Way, ...] = ("keras", "loop", "fit")
_TENSORFLOW_FEATURES = FIT_FEATURES - {"compile", "precision", "scheduler"}

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
        exact_with=(("compress", "none"),),
        links=True,
        options=(
            Option(
                "allreduce", "choice", "auto",
                choices=("auto", "backend", "ring", "hierarchical", "reduce_to_one",
                         "recursive_doubling"),
                help="how gradients are added up; auto measures, backend is gloo's or NCCL's own",
            ),
            Option(
                "compress", "str", "none", pattern=COMPRESSIONS,
                form="none, fp16, bf16, powersgd:RANK (1 or more), topk:FRACTION (above 0, to 1)",
                help="send fewer bytes, feeding back the error: fp16, bf16, powersgd:2, topk:0.01",
            ),
            Option(
                "bucket_mb", "float", 25.0, minimum=0.001, maximum=4096,
                help="size of the buckets that the backend reduces while backward still runs",
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
    Strategy(
        name="central_storage",
        framework="torch",
        term="synchronous training with central variables",
        summary="Weights and optimizer live on one host; workers pull them and push gradients.",
        module="workbench.strategies.torch.central_storage:CentralStorage",
        suits="few devices beside a host with memory to spare: optimizer state stays off them",
        source="Abadi et al., TensorFlow, OSDI 2016, section 4.4 (synchronous replicas)",
        aliases=("central",),
        supports=FIT_FEATURES - {"sparse_gradients"},
        servers=1,
        links=True,
        options=(
            Option(
                "link", "choice", "auto", choices=("auto", "shared_memory", "unix", "tcp"),
                help="what parameters and gradients travel through; auto takes the fastest",
            ),
        ),
    ),
    Strategy(
        name="parameter_server",
        framework="torch",
        term="asynchronous data parallelism (parameter server)",
        summary="Servers hold the parameters; each worker pushes and pulls at its own pace.",
        module="workbench.strategies.torch.parameter_server:ParameterServer",
        suits="workers of unequal speed, and to see what stale gradients do",
        source="Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI "
        "2014; Ho et al., Stale Synchronous Parallel, NIPS 2013",
        aliases=("ps",),
        supports=FIT_FEATURES - {"sparse_gradients"},
        sync=False,
        servers_option="servers",
        sync_option="sync",
        links=True,
        excludes=(
            ("sync", "max_staleness"), ("sync", "staleness_aware_lr"), ("sync", "pull_every"),
        ),
        options=(
            Option(
                "servers", "int", 1, minimum=1, maximum=64,
                help="how many servers share the parameters, divided by bytes",
            ),
            Option(
                "max_staleness", "int", None, minimum=0, optional=True,
                help="steps that the fastest worker may be ahead of the slowest; none: any",
            ),
            Option(
                "staleness_aware_lr", "bool", False,
                help="divide the learning rate of each push by its staleness",
            ),
            Option(
                "consistency", "choice", "latest", choices=("latest", "snapshot"),
                help="latest: each server's newest; snapshot: the same version from all servers",
            ),
            Option(
                "pull_every", "int", 1, minimum=1,
                help="steps that a worker computes on one copy of the parameters",
            ),
            Option(
                "sync", "bool", False,
                help="all workers' gradients make one step (BSP); equal to one device",
            ),
            Option(
                "link", "choice", "auto", choices=("auto", "shared_memory", "unix", "tcp"),
                help="what parameters and gradients travel through; auto takes the fastest",
            ),
        ),
    ),
    Strategy(
        name="sharded",
        framework="torch",
        term="fully sharded data parallelism (ZeRO)",
        summary="Each worker keeps 1/n of parameters, gradients and optimizer; layers are gathered "
        "when they compute.",
        module="workbench.strategies.torch.sharded:Sharded",
        suits="models whose parameters and optimizer state do not fit one device",
        source="Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023",
        aliases=("fsdp", "zero"),
        links=True,
        ways=("fit",),
        supports=FIT_FEATURES - {"compile", "sparse_gradients"},
        options=(
            Option(
                "unit_mb", "float", 1.0, minimum=0, maximum=65536,
                help="smallest layer, in MB of parameters, that is gathered on its own",
            ),
            Option(
                "reshard", "bool", True,
                help="free gathered layers between forward and backward (ZeRO-3); false: ZeRO-2",
            ),
            Option(
                "gather", "choice", "all", choices=("all", "first"),
                help="who gets the whole trained model at the end: all workers, or rank 0 alone",
            ),
        ),
    ),
    Strategy(
        name="model_split",
        framework="torch",
        term="pipeline (model) parallelism",
        summary="The model is cut into stages over the workers; microbatches follow each other.",
        module="workbench.strategies.torch.model_split:ModelSplit",
        suits="models that do not fit one device, cut into layers of similar cost",
        source="Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019",
        aliases=("pipeline",),
        links=True,
        data_parallel=False,
        whole=False,
        takes_turns=True,
        rules="workbench.pipelines:check",
        ways=("fit",),
        supports=FIT_FEATURES - {"step_fn", "accumulate", "compile"},
        options=_PIPELINE_OPTIONS,
    ),
    Strategy(
        name="hybrid",
        framework="torch",
        term="data x model parallelism",
        summary="Several pipelines side by side; each takes a share of the batch, stage by stage "
        "gradients are added up.",
        module="workbench.strategies.torch.hybrid:Hybrid",
        suits="models that do not fit one device, on more workers than stages are worth",
        source="Narayanan et al., PipeDream, SOSP 2019; Megatron-LM, SC 2021, section 3",
        aliases=("data_model",),
        links=True,
        whole=False,
        takes_turns=True,
        rules="workbench.pipelines:check",
        ways=("fit",),
        supports=FIT_FEATURES - {"step_fn", "accumulate", "compile", "sparse_gradients"},
        options=(
            Option(
                "stages", "int", None, minimum=1, maximum=4096, optional=True,
                help="workers that form one pipeline; none: 2 where they divide evenly",
            ),
            *_PIPELINE_OPTIONS,
        ),
    ),
    Strategy(
        name="tensor_parallel",
        framework="torch",
        term="tensor (intra-layer model) parallelism",
        summary="The weight matrices of a layer are divided over the workers, who compute it "
        "together.",
        module="workbench.strategies.torch.tensor_parallel:TensorParallel",
        suits="wide layers, on workers with fast links between them",
        source="Shoeybi et al., Megatron-LM, 2019, section 3",
        aliases=("tp",),
        links=True,
        data_parallel=False,
        ways=("fit",),
        supports=FIT_FEATURES - {"compile", "sparse_gradients"},
        options=(
            Option(
                "plan", "str", "auto",
                help="how layers are divided: auto, or NAME=col|row|gathered,.. (* matches any)",
            ),
            Option(
                "gather", "choice", "all", choices=("all", "first"),
                help="who gets the whole trained model at the end: all workers, or rank 0 alone",
            ),
        ),
    ),
    Strategy(
        name="local_sgd",
        framework="torch",
        term="local SGD (federated averaging)",
        summary="Workers train on their own for some steps, then average their parameters.",
        module="workbench.strategies.torch.local_sgd:LocalSGD",
        suits="slow links, and data that stays where it was collected",
        source="Stich, Local SGD, ICLR 2019; McMahan et al., federated averaging, AISTATS 2017",
        aliases=("fedavg",),
        supports=FIT_FEATURES - {"clip_norm"},
        exact_with=(("every", 1),),
        linear_only=True,
        links=True,
        options=(
            Option(
                "every", "int", 8, minimum=1,
                help="steps between averages; 1 with SGD equals one device",
            ),
            Option(
                "fraction", "float", 1.0, minimum=0.001, maximum=1,
                help="part of the workers that is drawn for each round; the others sit it out",
            ),
            Option(
                "skew", "float", None, minimum=0.001, optional=True,
                help="deal samples out by class: Dirichlet's alpha, 0.1 is very uneven; none: even",
            ),
        ),
    ),
    Strategy(
        name="gossip",
        framework="torch",
        term="decentralised SGD (gossip)",
        summary="No centre: after each step a worker mixes its parameters with its neighbours'.",
        module="workbench.strategies.torch.gossip:Gossip",
        suits="many workers on links where an all-reduce is slow, and to see replicas drift",
        source="Lian et al., D-PSGD, NIPS 2017; Ying et al., exponential graphs, NeurIPS 2021",
        aliases=("decentralised", "decentralized"),
        supports=FIT_FEATURES - {"clip_norm"},
        exact_with=None,
        links=True,
        options=(
            Option(
                "graph", "choice", "ring", choices=("ring", "exponential"),
                help="who meets whom: both neighbours on a ring, or one peer 1, 2, 4, .. hops away",
            ),
            Option(
                "spread_every", "int", 10, minimum=1,
                help="steps between two measurements of how far the replicas are apart",
            ),
        ),
    ),
    Strategy(
        name="one_device",
        framework="tensorflow",
        term="single-device training",
        summary="One replica does all the work; the yardstick every other strategy is held "
        "against.",
        module="workbench.strategies.tensorflow.one_device:OneDevice",
        suits="models that fit one device, and as the baseline of every comparison",
        source="tf.distribute.OneDeviceStrategy; Robbins and Monro, 1951",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        max_workers=1,
        one_engine=True,
    ),
    Strategy(
        name="mirrored",
        framework="tensorflow",
        term="synchronous data parallelism (all-reduce)",
        summary="One engine holds a replica on each of its devices; each takes a share of the "
        "batch, gradients are added up.",
        module="workbench.strategies.tensorflow.mirrored:Mirrored",
        suits="several GPUs of one host, and models that fit each of them",
        source="tf.distribute.MirroredStrategy; Abadi et al., TensorFlow, OSDI 2016, section 4.4",
        aliases=("data_parallel",),
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        # In a ring of CPUs a process can build one strategy only: the keys of its collectives are
        # taken for good, and a second one fails with another's shapes.
        needs_gpus=(("cross_device_ops", "nccl"), ("cross_device_ops", "ring")),
        options=(
            Option(
                "cross_device_ops", "choice", "auto",
                choices=("auto", "nccl", "hierarchical", "reduce_to_one", "ring"),
                help="how gradients are added up over the devices; auto: nccl on GPUs, else "
                "reduce_to_one; nccl and ring need GPUs",
            ),
        ),
    ),
    Strategy(
        name="multi_worker_mirrored",
        framework="tensorflow",
        term="synchronous data parallelism over several engines (all-reduce)",
        summary="One engine per worker, each with a full copy of the parameters; gradients are "
        "added up from engine to engine.",
        module="workbench.strategies.tensorflow.multi_worker_mirrored:MultiWorkerMirrored",
        suits="GPUs of several hosts, and one process per GPU",
        source="tf.distribute.MultiWorkerMirroredStrategy; Patarasuk and Yuan, JPDC 2009",
        aliases=("multi_worker",),
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        options=(
            Option(
                "communication", "choice", "auto", choices=("auto", "ring", "nccl"),
                help="how gradients travel; auto: nccl between GPUs, else a ring over gRPC",
            ),
            Option(
                "timeout_s", "float", 120.0, minimum=1.0, maximum=3600.0,
                help="seconds after which a worker gives up on the others",
            ),
        ),
    ),
    Strategy(
        name="central_storage",
        framework="tensorflow",
        term="synchronous data parallelism, parameters on one device",
        summary="Parameters and optimizer lie on one device of the engine; all its devices compute "
        "gradients, which are added up and applied there once.",
        module="workbench.strategies.tensorflow.central_storage:CentralStorage",
        suits="several devices of one host that have room for the parameters only once",
        source="tf.distribute.experimental.CentralStorageStrategy; Li et al., Scaling Distributed "
        "Machine Learning with the Parameter Server, OSDI 2014",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        options=(
            Option(
                "parameter_device", "choice", "auto", choices=("auto", "cpu"),
                help="where parameters lie; auto: the first device, cpu: the host's memory",
            ),
        ),
    ),
    Strategy(
        name="model_split",
        framework="tensorflow",
        term="model parallelism, one stage after the other",
        summary="The layers of one model lie on several devices; the batch goes through them in "
        "turn, so memory is saved and time is not.",
        module="workbench.strategies.tensorflow.model_split:ModelSplit",
        suits="models too large for one device, and to see why pipelines were invented",
        source="Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; tf.device",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        data_parallel=False,
        takes_turns=True,
        options=(
            Option(
                "split_at", "str", None, optional=True,
                help="layers that begin a stage, by name or number: 2,5 or conv2,fc1; none: "
                "parameters are balanced",
            ),
        ),
    ),
    Strategy(
        name="tpu",
        framework="tensorflow",
        term="synchronous data parallelism on TPU cores",
        summary="A replica on each core of a TPU; gradients are added up over its own links.",
        module="workbench.strategies.tensorflow.tpu:Tpu",
        suits="TPU machines of Google Cloud and Colab",
        source="tf.distribute.TPUStrategy; Jouppi et al., In-Datacenter Performance Analysis of a "
        "Tensor Processing Unit, ISCA 2017",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        rules="workbench.tpus:check",
        anywhere=False,
    ),
    Strategy(
        name="parameter_server",
        framework="tensorflow",
        term="asynchronous data parallelism (parameter server)",
        summary="Servers hold the variables; a coordinator hands steps to whichever worker is "
        "free.",
        module="workbench.strategies.tensorflow.parameter_server:ParameterServer",
        suits="workers of unequal speed, and to see what stale gradients do",
        source="tf.distribute.ParameterServerStrategy; Li et al., Parameter Server, OSDI 2014",
        aliases=("ps",),
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        sync=False,
        one_engine=True,
        remote_workers=True,
        servers_option="servers",
        exact_with=None,
        options=(
            Option(
                "servers", "int", 1, minimum=1, maximum=64,
                help="how many servers the variables are placed on, in turn",
            ),
            Option(
                "partitioner", "str", "none", pattern=r"none|fixed:0*[1-9]\d*|min_size:0*[1-9]\d*",
                form="none, fixed:PARTS, min_size:BYTES",
                help="cut each variable of an own loop into parts, spread over the servers",
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


def canonical(name: str, framework: str | None = None) -> str:
    """Return the name that an alias stands for; in any framework where none is given.

    Raises:
        PlanError: No strategy has that name, or the framework has none of that name.
    """
    for entry in strategies() if framework is None else ():
        if name == entry.name or name in entry.aliases:
            return entry.name
    return lookup(name, framework or FRAMEWORKS[0]).name


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
