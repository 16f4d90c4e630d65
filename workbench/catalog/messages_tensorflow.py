"""What TensorFlow's strategies send in a step; TensorFlow itself does not count the bytes."""

from __future__ import annotations

from . import patterns
from .messages import Arrow, Layout, Node, Parts, Phase
from .messages_torch import M, N

_WHOLE = "all variables and the optimizer's state"
_SHARE = "Each replica computes the gradient of its share of the batch."
_EQUAL = "Each replica applies the same sum: the copies stay equal."
GUIDE = "https://www.tensorflow.org/guide/distributed_training"


def _devices(layout: Layout, holds: str) -> tuple[Node, ...]:
    return tuple(
        Node(name, "device", f"device {rank}", holds, rank) for rank, name in enumerate(layout.ids)
    )


def one_device(layout: Layout) -> Parts:
    """One replica; nothing is sent."""
    phases = (
        Phase("Forward and backward", "One replica computes the whole batch.", layout.ids),
        Phase("Optimizer", "It takes the step.", layout.ids),
    )
    return Parts(_devices(layout, _WHOLE), phases, {}, "nothing is sent")


def _replicated(
    layout: Layout, nodes: tuple[Node, ...], phases: tuple[Phase, ...], source: str,
    notes: tuple[str, ...] = (),
) -> Parts:  # fmt: skip
    every = (
        Phase("Forward and backward", _SHARE, layout.ids), *phases,
        Phase("Optimizer", _EQUAL, layout.ids),
    )  # fmt: skip
    return Parts(nodes, every, {**M, **N}, source, notes)


def mirrored(layout: Layout) -> Parts:
    """All-reduce between the devices of one engine."""
    asked = str(layout.options["cross_device_ops"])
    notes = ("auto: NCCL's ring on GPUs, as drawn on CPUs.",) if asked == "auto" else ()
    pattern, source = patterns.ALL_REDUCE["reduce_to_one" if asked == "auto" else asked]
    phases = pattern(layout.ids, "gradients", "M")
    return _replicated(layout, _devices(layout, _WHOLE), phases, source, notes)


def multi_worker_mirrored(layout: Layout) -> Parts:
    """All-reduce between engines, in a ring."""
    phases = patterns.ring(layout.ids, "gradients", "M")
    return _replicated(layout, patterns.workers(layout, _WHOLE), phases, patterns.RING)


def tpu(layout: Layout) -> Parts:
    """All-reduce over the TPU's own links, compiled into the step."""
    text = "XLA compiles the sum into the step; the way it takes over the torus is its own."
    phases = patterns.ring_at_once(layout.ids, "gradients", "M", "All-reduce", text)
    nodes = tuple(
        Node(name, "device", f"core {rank}", _WHOLE, rank) for rank, name in enumerate(layout.ids)
    )
    return _replicated(layout, nodes, phases, f"Jouppi et al., ISCA 2017; {patterns.RING}")


def central_storage(layout: Layout) -> Parts:
    """Variables lie on one device; gradients go there, variables are read from there."""
    apart = layout.options["parameter_device"] == "cpu"
    home = "h" if apart else layout.ids[0]
    others = [name for name in layout.ids if name != home]
    size = patterns.whole("M")
    devices = _devices(layout, "nothing between steps")
    nodes = devices
    if apart:
        nodes = patterns.around(devices, (Node("h", "store", "host", _WHOLE),))
    else:
        nodes = (Node(home, "device", "device 0", _WHOLE, 0), *devices[1:])
    read = tuple(Arrow(home, one, "weights", size) for one in others)
    push = tuple(Arrow(one, home, "gradients", size) for one in others)
    phases = [
        Phase("Forward and backward", _SHARE, layout.ids),
        Phase("Optimizer", "The gradients are added up and applied once.", (home,)),
    ]
    if others:
        phases.insert(0, Phase("Read", "Every device reads the variables.", arrows=read,
                               formula="M to each"))  # fmt: skip
        phases.insert(2, Phase("Send", "Every device sends its gradients to where the variables "
                               "lie.", arrows=push, formula="M"))  # fmt: skip
    return Parts(nodes, tuple(phases), M, f"tf.distribute.CentralStorageStrategy, {GUIDE}")


def model_split(layout: Layout) -> Parts:
    """The whole batch goes through the devices in turn."""
    ids = layout.ids
    nodes = tuple(
        Node(name, "device", f"device {rank}", f"stage {rank}", rank)
        for rank, name in enumerate(ids)
    )
    formula = "A" if len(ids) > 1 else ""
    phases = (
        Phase("Forward", "One stage after the other computes the whole batch.", ids,
              patterns.chain(ids, 1, backward=False), formula=formula),
        Phase("Backward", "The gradients of the activations come back.", ids,
              patterns.chain(ids, 1, backward=True), formula=formula),
        Phase("Optimizer", "Each device updates its own layers.", ids),
    )  # fmt: skip
    units = patterns.handed_units(len(ids))
    source = "Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 3"
    notes = ("While one stage computes, the others stand idle.",) if len(ids) > 1 else ()
    return Parts(nodes, phases, units, source, notes)


def parameter_server(layout: Layout) -> Parts:
    """A coordinator hands out closures; workers read from and write to the servers."""
    servers = tuple(f"s{index}" for index in range(layout.servers))
    inner = (
        Node("c", "coordinator", "coordinator", "the order of the steps"),
        *(Node(name, "server", f"server {name[1:]}", "its part of the variables and optimizer")
          for name in servers),
    )  # fmt: skip
    size = patterns.whole("T")
    work = tuple(Arrow("c", worker, "work", size) for worker in layout.ids)
    phases = (
        Phase("Schedule", "Whichever worker is free is handed the next step.", ("c",), work,
              formula="T each"),
        patterns.exchange_with_server(layout, servers, "M", "weights", "Pull",
                                      "The worker reads the variables.", up=False),
        Phase("Forward and backward", "It computes the gradient of its batch.", layout.ids),
        patterns.exchange_with_server(layout, servers, "M", "gradients", "Push",
                                      "It sends the gradients to the servers.", up=True),
        Phase("Optimizer", "Every push is a step of its own, taken when it arrives.", servers),
    )  # fmt: skip
    units = {
        **M, **patterns.server_units("M", len(servers)),
        "T": "bytes of a closure and of the samples it is sent",
    }  # fmt: skip
    nodes = patterns.around(patterns.workers(layout, "nothing between steps"), inner)
    source = "tf.distribute.ParameterServerStrategy; Li et al., Parameter Server, OSDI 2014"
    notes = ("Nobody waits: each worker goes through this at its own pace.",)
    return Parts(nodes, phases, units, source, notes)
