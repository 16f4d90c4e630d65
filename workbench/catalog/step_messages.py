"""What each strategy sends in a step: one function for each, named by its entry of the catalog.

For PyTorch, `sent_bytes` counts the same sizes; TensorFlow does not count its bytes.
"""

from __future__ import annotations

import math
from functools import partial

from . import diagrams, schedules
from .diagrams import Arrow, Layout, Node, Parts, Phase, Size
from .spec import chained

M = {"M": "bytes of the gradients; the trained parameters have the same size"}
N = {"N": "number of workers"}
L = {"L": "number of leaders"}
_WHOLE = "all parameters and the optimizer's state"
FORWARD_BACKWARD = "Each worker computes the gradient of its share of the batch."
OPTIMIZER = "All workers take the same step, so the copies of the model stay equal."


def _work(layout: Layout, text: str = FORWARD_BACKWARD) -> Phase:
    return Phase("Forward and backward", text, layout.ids)


def _update(layout: Layout, text: str = OPTIMIZER) -> Phase:
    return Phase("Optimizer", text, layout.ids)


def one_device(layout: Layout) -> Parts:
    """One worker; nothing is sent."""
    work = _work(layout, "One worker computes the gradient of the whole batch.")
    phases = (work, _update(layout, "The worker updates the parameters."))
    return Parts(
        diagrams.workers(layout, _WHOLE),
        phases,
        {},
        "Robbins and Monro, A Stochastic Approximation Method, 1951",
    )


def mirrored(layout: Layout) -> Parts:
    """All-reduce of the gradients, with the requested algorithm and compression."""
    compress, asked = str(layout.options["compress"]), str(layout.options["allreduce"])
    algorithm = "backend" if asked == "auto" else asked
    gathers = compress.startswith("topk")
    many = L if algorithm == "hierarchical" and not gathers else N
    units, notes = {**M, **many}, []
    if asked == "auto" and not gathers:
        notes.append(
            "With allreduce=auto, Workbench measures the algorithms and chooses one. The "
            "diagram shows only one possible choice: the algorithm of the backend (gloo or NCCL)."
        )
    unit = "M" if compress == "none" else "C"
    if unit == "C":
        units = {"C": f"bytes of the gradients after compression with {compress}", **many}
    pattern, source = diagrams.ALL_REDUCE[algorithm]
    phases = pattern(layout.ids, "gradients", unit)
    if gathers:
        phases = _gathered(layout)
        source = "ring all-gather; Aji and Heafield, Sparse Communication, EMNLP 2017"
    if algorithm == "backend" and compress == "none":
        notes.append("During the backward pass, gradients are sent in buckets (groups).")
    return Parts(
        diagrams.workers(layout, _WHOLE),
        (_work(layout), *phases, _update(layout)), units, source, tuple(notes),
    )  # fmt: skip


def _gathered(layout: Layout) -> tuple[Phase, ...]:
    """Return the ring on which the chosen values of all workers travel."""
    n = layout.workers
    if n < 2:
        return ()
    size = diagrams.whole("C")
    following = [*layout.ids[1:], layout.ids[0]]
    arrows = tuple(
        Arrow(a, b, "gradients", size, n - 1)
        for a, b in zip(layout.ids, following, strict=True)
    )  # fmt: skip
    text = (
        "The workers form a ring. Each worker sends the largest values of its gradient, and their "
        "positions, around this ring. At the end, every worker has the values of all workers."
    )
    return (Phase("All-gather", text, arrows=arrows, formula="C, N-1 rounds"),)


def _with_servers(layout: Layout, holds: str, phases: tuple[Phase, ...], source: str,
                  notes: tuple[str, ...] = ()) -> Parts:  # fmt: skip
    chains = _chains(layout)
    servers = tuple(
        Node(f"s{i}", "server", f"server {i}", _held_by(i, chains, holds))
        for i in range(layout.servers)
    )
    nodes = diagrams.around(diagrams.workers(layout, "a copy of the parameters"), servers)
    units = {**M, **diagrams.server_units("M", len(chains))}
    if len(chains[0]) > 1:
        source += "; van Renesse and Schneider, Chain Replication, OSDI 2004"
    return Parts(nodes, phases, units, source, notes)


def _chains(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return which servers hold each part."""
    options = layout.options
    return chained(int(options.get("servers", 1)), int(options.get("replicas", 1)))


def _held_by(server: int, chains: tuple[tuple[int, ...], ...], holds: str) -> str:
    own = [holds] if server < len(chains) else []
    followed = [chain[0] for chain in chains if server in chain[1:]]
    copy = [f"a copy of server {followed[0]}'s parameters"] if followed else []
    return "; ".join(own + copy)


def central_storage(layout: Layout) -> Parts:
    """Send gradients to the single server, and parameters back."""
    ids = ("s0",)
    push = diagrams.exchange_with_server(
        layout,
        ids,
        "M",
        "gradients",
        "Push",
        "Each worker sends its gradient to the server.",
        up=True,
    )
    pull = diagrams.exchange_with_server(
        layout, ids, "M", "weights", "Pull", "Each worker receives the new parameters.", up=False
    )
    step = Phase("Optimizer", "The server adds up all gradients and takes one step.", ids)
    copy = diagrams.copies(layout, _chains(layout), "M", together=True)
    return _with_servers(
        layout, _WHOLE, (_work(layout), push, step, *copy, pull),
        "Abadi et al., TensorFlow, OSDI 2016, section 4.4 (synchronous replicas)",
    )  # fmt: skip


def parameter_server(layout: Layout) -> Parts:
    """Push to and pull from every server, together or at each worker's own speed."""
    ids = tuple(f"s{index}" for index in range(int(layout.options.get("servers", 1))))
    every, bound = int(layout.options["pull_every"]), layout.options["max_staleness"]
    together = bool(layout.options["sync"])
    push = diagrams.exchange_with_server(
        layout, ids, "M", "gradients", "Push",
        "Each server receives the gradient of the parameters that it holds.", up=True,
    )  # fmt: skip
    which = "the newest parameters"
    if layout.options["consistency"] == "snapshot":
        which = "parameters from all servers, and all servers send the same version"
    pulled = diagrams.exchange_with_server(
        layout, ids, "M", "weights", "Pull", f"Each worker receives {which}.", up=False
    )
    pull = Phase(pulled.title, pulled.text, (), pulled.arrows, every, every - 1, pulled.formula)
    alone = "When a push arrives, the server takes a step at once, with this push only."
    common = "The servers take one step with the gradients of all workers."
    step = Phase("Optimizer", common if together else alone, ids)
    notes = (
        []
        if together
        else [("No worker waits for another worker: each takes its steps at its own speed.")]
    )
    if bound is not None:
        ahead = f"{bound} step{'' if bound == 1 else 's'} ahead of the slowest worker"
        notes = [f"A worker that is more than {ahead} must wait."]
    copy = diagrams.copies(layout, _chains(layout), "M", together=together)
    return _with_servers(
        layout, "its part of the parameters and of the optimizer's state",
        (_work(layout), push, step, *copy, pull),
        "Li et al., Parameter Server, OSDI 2014; Ho et al., SSP, NIPS 2013", tuple(notes),
    )  # fmt: skip


def sharded(layout: Layout) -> Parts:
    """Layers are gathered to compute, gradients scattered to their owners."""
    gather = (
        "Each worker holds a part (a shard) of every layer. The workers gather all shards of one "
        "layer, and compute this layer. Then they do the same for the next layer."
    )
    forward = diagrams.scatter_ring(layout.ids, "weights", "M", "All-gather, forward", gather)
    again: tuple[Phase, ...] = ()
    units = {**M, **N}
    if layout.options["reshard"]:
        again = diagrams.scatter_ring(
            layout.ids, "weights", "U", "All-gather, backward",
            "After the forward pass, each worker kept only its own shard of each large layer. Now "
            "the workers gather these layers again.",
        )  # fmt: skip
        units["U"] = (
            "bytes of all large layers together. A layer is large if it has at least unit_mb MB. "
            "After the forward pass, a worker keeps only its own shard of each large layer. For "
            "the backward pass, the workers gather these layers again"
        )
    scatter = diagrams.scatter_ring(
        layout.ids, "gradients", "M", "Reduce-scatter",
        "Each worker receives the sum of the gradients for its own shard.",
    )  # fmt: skip
    compute = "Each worker computes its share of the batch."
    phases = (
        *forward, Phase("Forward", compute, layout.ids),
        *again, Phase("Backward", compute, layout.ids), *scatter,
        _update(layout, "Each worker updates its own shard. The optimizer's state is sharded too."),
    )  # fmt: skip
    holds = "1/N of parameters, gradients and optimizer state"
    source = "Rajbhandari et al., ZeRO, SC 2020, section 7; Zhao et al., FSDP, VLDB 2023"
    return Parts(diagrams.workers(layout, holds), phases, units, source)


def _pipeline(layout: Layout, workers: int) -> tuple[int, int, str]:
    """Return the stages, the microbatches and the schedule."""
    per_worker = schedules.stages_per_worker(layout.options)
    batches = schedules.microbatches(layout.options, workers)
    name = str(layout.options["schedule"])
    return per_worker * workers, batches, f"{name}: {schedules.SCHEDULES[name].source}"


def model_split(layout: Layout) -> Parts:
    """Activations travel from stage to stage, and their gradients travel back."""
    schedules.check_schedule(layout.options, layout.workers, None)
    stages, batches, source = _pipeline(layout, layout.workers)
    holders = [layout.ids[stage % layout.workers] for stage in range(stages)]
    phases = (
        *_flow(layout, [holders], batches),
        _update(layout, "Each worker updates its own stages."),
    )
    units = diagrams.handed_units(stages) | ({"m": "number of microbatches"} if batches > 1 else {})
    nodes = tuple(
        Node(name, "worker", f"worker {rank}", _stages_of(rank, stages, layout.workers), rank)
        for rank, name in enumerate(layout.ids)
    )
    return Parts(nodes, phases, units if layout.workers > 1 else {}, source, _mixed(batches))


def hybrid(layout: Layout) -> Parts:
    """Several pipelines; the workers that hold the same stage add up its gradients."""
    schedules.check_schedule(layout.options, layout.workers, None)
    width = int(layout.options["stages"] or (1 if layout.workers % 2 else 2))
    stages, batches, source = _pipeline(layout, width)
    rows = [layout.ids[first : first + width] for first in range(0, layout.workers, width)]
    chains = [[row[stage % width] for stage in range(stages)] for row in rows]
    arrows: list[Arrow] = []
    for place in range(width):
        column = [row[place] for row in rows]
        for phase in diagrams.ring_at_once(column, "gradients", f"G{place}", "", "", by="D"):
            arrows += phase.arrows
    text = "The workers that hold the same stage add up their gradients."
    meet = (Phase("All-reduce by stage", text, (), tuple(arrows), formula="G/D, 2(D-1) rounds"),)
    units = diagrams.handed_units(stages) if width > 1 else {}
    units |= {
        f"G{p}": f"bytes of the gradients on a worker that holds stage {p}" for p in range(width)
    }
    units |= {
        "D": "number of pipelines",
        **({"m": "number of microbatches"} if batches > 1 else {}),
    }
    nodes = tuple(
        Node(name, "worker", f"worker {rank}", _stages_of(rank % width, stages, width), rank)
        for rank, name in enumerate(layout.ids)
    )
    phases = (
        *_flow(layout, chains, batches), *(meet if arrows else ()),
        _update(layout, "Each worker updates its own stages."),
    )  # fmt: skip
    return Parts(nodes, phases, units, f"{source}; {diagrams.RING}", _mixed(batches))


def _flow(layout: Layout, chains: list[list[str]], batches: int) -> tuple[Phase, ...]:
    forward = tuple(a for one in chains for a in diagrams.chain(one, batches, backward=False))
    backward = tuple(a for one in chains for a in diagrams.chain(one, batches, backward=True))
    size = "A/m, m microbatches" if batches > 1 else "A"
    text = "Each stage computes its activations and sends them to the next stage."
    back = "The gradients of the activations are sent back, from stage to stage."
    return (
        Phase("Forward", text, layout.ids, forward, formula=size if forward else ""),
        Phase("Backward", back, layout.ids, backward, formula=size if backward else ""),
    )


def _stages_of(place: int, stages: int, width: int) -> str:
    own = range(place, stages, width)
    return f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"


def _mixed(batches: int) -> tuple[str, ...]:
    if batches == 1:
        return ()
    return (
        "Several microbatches are in the pipeline, so the stages work at the same time. The "
        "schedule decides the order of the forward and backward passes.",
    )


def tensor_parallel(layout: Layout) -> Parts:
    """Partial results are added up inside forward and backward."""
    forward = diagrams.ring_at_once(
        layout.ids, "activations", "Y", "All-reduce, forward",
        "A pair is two divided layers, one after the other. After the second layer, every worker "
        "has only a partial sum of the pair's output. The workers add up these partial sums.",
    )  # fmt: skip
    backward = diagrams.ring_at_once(
        layout.ids, "gradients", "X", "All-reduce, backward",
        "In the backward pass, each pair of divided layers computes the gradient with respect to "
        "the pair's input. Every worker has only a partial sum of this gradient. The workers add "
        "up these partial sums.",
    )  # fmt: skip
    every = "Every worker reads the whole batch and computes its part of each divided layer."
    phases = (
        Phase("Forward", every, layout.ids), *forward,
        Phase("Backward", every, layout.ids), *backward,
        _update(layout, "Each worker updates its own part of the layers."),
    )  # fmt: skip
    units = {
        "Y": (
            "bytes of the outputs that the workers add up in the forward pass, for one batch. A "
            "pair is two divided layers, one after the other. For each pair, the workers add up "
            "the output of the second layer"
        ),
        "X": (
            "bytes of the gradients that the workers add up in the backward pass, for one batch. "
            "A pair is two divided layers, one after the other. For each pair, the workers add up "
            "the gradient with respect to the pair's input. The input of the model needs no "
            "gradient, so it is not included"
        ),
        **N,
    }
    nodes = diagrams.workers(layout, "1/N of the divided layers")
    return Parts(nodes, phases, units, "Shoeybi et al., Megatron-LM, 2019, section 3")


def local_sgd(layout: Layout) -> Parts:
    """Local steps; parameters are averaged at the end of a round, or fragment by fragment."""
    options, notes = layout.options, []
    schedules.check_turns(options, layout.workers, None)
    outer, fragments = options["outer"] == "nesterov", int(options["fragments"])
    holds, source = _WHOLE, "Stich, Local SGD, ICLR 2019"
    who = "all workers"
    if options["fraction"] < 1:
        who = "the workers that take part"
        notes.append(
            f"With fraction={options['fraction']:g}, only some workers take part in each round. "
            "The other workers do not train. They send zeros, which do not count in the mean."
        )
    if outer:
        holds = f"{_WHOLE}; the outer momentum; the parameters from the start of the round"
        source = "Douillard et al., DiLoCo, 2023, algorithm 1"
        notes.append(
            "The outer step begins with the parameters from the start of the round. "
            f"In this round, the parameters of {who} have changed. The mean of these changes is "
            "the direction of the outer step. The outer step uses learning rate "
            f"{options['outer_lr']:g} and Nesterov momentum {options['outer_momentum']:g}. The "
            "outer step itself sends no messages."
        )
    if fragments > 1:
        source = f"{source}; Douillard et al., Streaming DiLoCo, 2025"
    phases = (
        _work(layout), _update(layout, "Workers take separate steps, so the copies of the "
        "model become different."),
        *_meetings(layout, "are updated by an outer step. The outer step uses the mean of the "
                   f"parameters over {who}" if outer else f"are replaced by their mean over {who}"),
    )  # fmt: skip
    units = {"P": "bytes of parameters and floating-point buffers", **N}
    units |= {"F": "number of fragments (parts of the parameters)"} if fragments > 1 else {}
    source = f"{source}; {diagrams.RING}"
    return Parts(diagrams.workers(layout, holds), phases, units, source, tuple(notes))


def _meetings(layout: Layout, what: str) -> tuple[Phase, ...]:
    """Return the all-reduces of a round: one, or one for each fragment."""
    every, fragments = int(layout.options["every"]), int(layout.options["fragments"])
    ring = partial(diagrams.ring_at_once, layout.ids, "average", "P", fragments=fragments)
    if fragments == 1:
        often = "All" if every == 1 else f"Every {every} steps, all"
        return ring("Average", f"{often} parameters {what}.", every=every)
    turns = schedules.turns(layout.options)
    if (
        every % fragments == 0
    ):  # the turns are equally far apart, so one phase describes all of them
        gap = "each step" if turns[0] == 1 else f"every {turns[0]} steps"
        text = (
            f"The fragments take turns: after {gap}, the parameters of the next fragment {what}. "
            f"So each of the {fragments} fragments is averaged once in every {every} steps."
        )
        return ring("Average in turn", text, every=turns[0])
    return tuple(
        phase
        for place, turn in enumerate(turns, 1)
        for phase in ring(
            f"Average, fragment {place}",
            f"A round has {every} steps. After step {turn} of each round, the parameters of this "
            f"fragment {what}.",
            every=every, turn=turn,
        )
    )  # fmt: skip


def gossip(layout: Layout) -> Parts:
    """Parameters are mixed with the neighbours' after every step."""
    n, size = layout.workers, Size(1.0, "P", "P")
    rounds = _graph(str(layout.options["graph"]), n)
    meet = tuple(
        Phase(
            "Mix" if len(rounds) == 1 else f"Mix, hop {hops[0]}",
            "Each worker's new parameters are the mean of its own and the received parameters.",
            (),
            tuple(
                Arrow(layout.ids[r], layout.ids[(r + hop) % n], "average", size)
                for r in range(n) for hop in hops
            ),
            len(rounds), index, "P to each neighbour",
        )
        for index, hops in enumerate(rounds)
    )  # fmt: skip
    phases = (
        _work(layout), _update(layout, "Workers take separate steps, so the copies of the "
        "model become different."), *meet
    )  # fmt: skip
    units = {"P": "bytes of parameters and floating-point buffers"} if n > 1 else {}
    source = "Lian et al., D-PSGD, NIPS 2017; Ying et al., exponential graphs, NeurIPS 2021"
    return Parts(diagrams.workers(layout, _WHOLE), phases, units, source)


def _graph(graph: str, n: int) -> list[list[int]]:
    """Return for each step the distance between sender and receiver, in ranks."""
    if n == 1:
        return []
    if graph == "ring":
        return [sorted({1, n - 1})]
    return [[1 << k] for k in range(max(1, math.ceil(math.log2(n))))]


_TENSORFLOW_WHOLE = "all variables and the optimizer's state"
_SHARE = "Each replica computes the gradient of its share of the batch."
_EQUAL = "Each replica applies the same sum of gradients, so the copies of the model stay equal."
GUIDE = "https://www.tensorflow.org/guide/distributed_training"


def _devices(layout: Layout, holds: str) -> tuple[Node, ...]:
    return tuple(
        Node(name, "device", f"device {rank}", holds, rank) for rank, name in enumerate(layout.ids)
    )


def tensorflow_one_device(layout: Layout) -> Parts:
    """One replica; nothing is sent."""
    phases = (
        Phase(
            "Forward and backward",
            "One replica computes the gradient of the whole batch.",
            layout.ids,
        ),
        Phase("Optimizer", "The replica updates the parameters.", layout.ids),
    )
    return Parts(
        _devices(layout, _TENSORFLOW_WHOLE),
        phases,
        {},
        "tf.distribute.OneDeviceStrategy; Robbins and Monro, 1951",
    )


def _replicated(
    layout: Layout, nodes: tuple[Node, ...], phases: tuple[Phase, ...], source: str,
    notes: tuple[str, ...] = (),
) -> Parts:  # fmt: skip
    every = (
        Phase("Forward and backward", _SHARE, layout.ids), *phases,
        Phase("Optimizer", _EQUAL, layout.ids),
    )  # fmt: skip
    return Parts(nodes, every, {**M, **N}, source, notes)


def tensorflow_mirrored(layout: Layout) -> Parts:
    """All-reduce between the devices of one engine."""
    asked = str(layout.options["cross_device_ops"])
    notes = (
        (
            "With cross_device_ops=auto, GPUs use NCCL's all-reduce, and CPUs use the algorithm of "
            "this diagram.",
        )
        if asked == "auto"
        else ()
    )
    pattern, source = diagrams.ALL_REDUCE["reduce_to_one" if asked == "auto" else asked]
    phases = pattern(layout.ids, "gradients", "M")
    return _replicated(layout, _devices(layout, _TENSORFLOW_WHOLE), phases, source, notes)


def multi_worker_mirrored(layout: Layout) -> Parts:
    """All-reduce between engines, in a ring."""
    phases = diagrams.ring(layout.ids, "gradients", "M")
    return _replicated(layout, diagrams.workers(layout, _TENSORFLOW_WHOLE), phases, diagrams.RING)


def tpu(layout: Layout) -> Parts:
    """All-reduce over the TPU's own links, compiled into the step."""
    text = (
        "XLA compiles the step and the all-reduce together. XLA also chooses the route through the "
        "TPU's network."
    )
    phases = diagrams.ring_at_once(layout.ids, "gradients", "M", "All-reduce", text)
    nodes = tuple(
        Node(name, "device", f"core {rank}", _TENSORFLOW_WHOLE, rank)
        for rank, name in enumerate(layout.ids)
    )
    return _replicated(layout, nodes, phases, f"Jouppi et al., ISCA 2017; {diagrams.RING}")


def tensorflow_central_storage(layout: Layout) -> Parts:
    """One device holds the variables: it receives gradients, and all devices read from it."""
    apart = layout.options["parameter_device"] == "cpu"
    home = "h" if apart else layout.ids[0]
    others = [name for name in layout.ids if name != home]
    size = diagrams.whole("M")
    devices = _devices(layout, "nothing between two steps")
    nodes = devices
    if apart:
        nodes = diagrams.around(devices, (Node("h", "store", "host", _TENSORFLOW_WHOLE),))
    else:
        nodes = (Node(home, "device", "device 0", _TENSORFLOW_WHOLE, 0), *devices[1:])
    read = tuple(Arrow(home, one, "weights", size) for one in others)
    push = tuple(Arrow(one, home, "gradients", size) for one in others)
    phases = [
        Phase("Forward and backward", _SHARE, layout.ids),
        Phase(
            "Optimizer",
            "One device adds up the gradients, and makes one update with the sum.",
            (home,),
        ),
    ]
    if others:
        phases.insert(0, Phase("Read", "Every device reads the variables from the device that "
        "holds them.", arrows=read,
                               formula="M to each"))  # fmt: skip
        phases.insert(2, Phase("Send", "Every device sends its gradients to the device that "
        "holds the variables.", arrows=push, formula="M"))  # fmt: skip
    return Parts(nodes, tuple(phases), M, f"tf.distribute.CentralStorageStrategy, {GUIDE}")


def tensorflow_model_split(layout: Layout) -> Parts:
    """The whole batch goes through the devices one after another."""
    ids = layout.ids
    nodes = tuple(
        Node(name, "device", f"device {rank}", f"stage {rank}", rank)
        for rank, name in enumerate(ids)
    )
    formula = "A" if len(ids) > 1 else ""
    phases = (
        Phase("Forward", "The stages compute one after the other. Each stage computes its layers "
              "for the whole batch.", ids, diagrams.chain(ids, 1, backward=False), formula=formula),
        Phase("Backward", "The gradients of the activations are sent back, from stage to stage.",
              ids, diagrams.chain(ids, 1, backward=True), formula=formula),
        Phase("Optimizer", "Each device updates its own layers.", ids),
    )  # fmt: skip
    units = diagrams.handed_units(len(ids))
    source = "Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 3"
    notes = ("While one stage computes, the other stages are idle.",) if len(ids) > 1 else ()
    return Parts(nodes, phases, units, source, notes)


def tensorflow_parameter_server(layout: Layout) -> Parts:
    """A coordinator sends closures to workers, which read from and write to the servers."""
    servers = tuple(f"s{index}" for index in range(layout.servers))
    inner = (
        Node("c", "coordinator", "coordinator", "the steps that are not finished"),
        *(Node(name, "server", f"server {name[1:]}",
               "its part of the variables and of the optimizer's state")
          for name in servers),
    )  # fmt: skip
    size = diagrams.whole("T")
    work = tuple(Arrow("c", worker, "work", size) for worker in layout.ids)
    phases = (
        Phase("Schedule", "The coordinator gives each step to an idle worker.", ("c",), work,
              formula="T each"),
        diagrams.exchange_with_server(layout, servers, "M", "weights", "Pull",
                                      "The worker reads the variables from the servers.", up=False),
        Phase("Forward and backward", "The worker computes the gradient of its batch.", layout.ids),
        diagrams.exchange_with_server(layout, servers, "M", "gradients", "Push",
                                      "The worker sends the gradients to the servers.", up=True),
        Phase("Optimizer", "When a push arrives, the server takes a step at once, with this push "
        "only.", servers),
    )  # fmt: skip
    units = {
        **M, **diagrams.server_units("M", len(servers)),
        "T": "bytes of a closure (a function that computes one step) and of the samples that the "
        "closure needs",
    }  # fmt: skip
    nodes = diagrams.around(diagrams.workers(layout, "nothing between two steps"), inner)
    source = "tf.distribute.ParameterServerStrategy; Li et al., Parameter Server, OSDI 2014"
    notes = ("No worker waits for another worker: each takes its steps at its own speed.",)
    return Parts(nodes, phases, units, source, notes)
