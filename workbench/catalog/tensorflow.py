"""The entries of TensorFlow's strategies."""

from __future__ import annotations

from .spec import FIT_FEATURES, Option, Strategy, Way

_TENSORFLOW_WAYS: tuple[Way, ...] = ("keras", "loop", "fit")
_TENSORFLOW_FEATURES = FIT_FEATURES - {"compile"}
_COORDINATED_FEATURES = _TENSORFLOW_FEATURES - {"scheduler"}  # its steps have no order

TENSORFLOW: tuple[Strategy, ...] = (
    Strategy(
        name="one_device",
        framework="tensorflow",
        term="single-device training",
        summary="One replica does all the work; the yardstick every other strategy is held "
        "against.",
        module="workbench.strategies.tensorflow.one_device:OneDevice",
        messages="workbench.catalog.step_messages:tensorflow_one_device",
        suits="models that fit one device, and as the baseline of every comparison",
        shares_gpu=True,
        source="tf.distribute.OneDeviceStrategy; Robbins and Monro, 1951",
        ways=_TENSORFLOW_WAYS,
        supports=FIT_FEATURES,
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
        messages="workbench.catalog.step_messages:tensorflow_mirrored",
        suits="several GPUs of one host, and models that fit each of them",
        source="tf.distribute.MirroredStrategy; Abadi et al., TensorFlow, OSDI 2016, section 4.4",
        aliases=("data_parallel",),
        ways=_TENSORFLOW_WAYS,
        supports=FIT_FEATURES,
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
        messages="workbench.catalog.step_messages:multi_worker_mirrored",
        suits="one process per GPU, on one host or several",
        source="tf.distribute.MultiWorkerMirroredStrategy; Patarasuk and Yuan, JPDC 2009",
        aliases=("multi_worker",),
        ways=_TENSORFLOW_WAYS,
        supports=FIT_FEATURES,
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
        messages="workbench.catalog.step_messages:tensorflow_central_storage",
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
        messages="workbench.catalog.step_messages:tensorflow_model_split",
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
        messages="workbench.catalog.step_messages:tpu",
        suits="a TPU, though it was never run on one: only its refusals are tested",
        source="tf.distribute.TPUStrategy; Jouppi et al., In-Datacenter Performance Analysis of a "
        "Tensor Processing Unit, ISCA 2017",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        rules="workbench.strategies.tensorflow.tpu:check",
        anywhere=False,
    ),
    Strategy(
        name="parameter_server",
        framework="tensorflow",
        term="asynchronous data parallelism (parameter server)",
        summary="Servers hold the variables; a coordinator hands steps to whichever worker is "
        "free.",
        module="workbench.strategies.tensorflow.parameter_server:ParameterServer",
        messages="workbench.catalog.step_messages:tensorflow_parameter_server",
        suits="workers of unequal speed, and to see what stale gradients do",
        shares_gpu=True,
        source="tf.distribute.ParameterServerStrategy; Li et al., Parameter Server, OSDI 2014",
        aliases=("ps",),
        ways=_TENSORFLOW_WAYS,
        supports=_COORDINATED_FEATURES,
        sync=False,
        one_engine=True,
        remote_workers=True,
        loses="the steps since the last checkpoint; no push is under way when one is taken",
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
