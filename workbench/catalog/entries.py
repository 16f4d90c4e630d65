"""The entries of PyTorch's strategies."""

from __future__ import annotations

from .spec import FIT_FEATURES, Option, Strategy, Way

# topk's fraction: above 0, at most 1; an exponent is always negative.
_FRACTION = r"1(\.0*)?|0?\.0*[1-9]\d*|[1-9](\.\d+)?e-\d+"
COMPRESSIONS = rf"none|fp16|bf16|powersgd:0*[1-9]\d*|topk:({_FRACTION})"

_PIPELINE_OPTIONS = (
    Option(
        "schedule", "choice", "1f1b",
        choices=("naive", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        help="the order in which a stage computes the forward and backward passes of the "
        "microbatches; `naive`: the whole batch is one microbatch",
    ),
    Option(
        "microbatches", "int", None, minimum=1, maximum=4096, optional=True,
        help="number of microbatches into which a pipeline divides its batch. With "
        "schedule=naive, `none` means 1. Otherwise `none` means twice the number of the "
        "pipeline's workers, or fewer if the batch is small",
    ),
    Option(
        "stages_per_worker", "int", None, minimum=1, maximum=64, optional=True,
        help="number of stages on each worker; only for schedule=interleaved and "
        "schedule=zero_bubble. With schedule=interleaved, `none` means 2. With every other "
        "schedule, `none` means 1",
    ),
    Option(
        "split_at", "str", None, optional=True,
        help="list of the layers at which a new stage begins: their names (conv2,fc1) or their "
        "numbers (2,5). `none`: Workbench measures all layers and decides where each stage begins",
    ),
)  # fmt: skip

TORCH: tuple[Strategy, ...] = (
    Strategy(
        name="one_device",
        framework="torch",
        term="single-device training",
        summary="One worker does all the work. Other strategies are compared with this strategy.",
        module="workbench.strategies.torch.one_device:OneDevice",
        messages="workbench.catalog.step_messages:one_device",
        suits="models that fit on one device; a baseline for other strategies",
        shares_gpu=True,
        unhealed="the strategy has only one worker",
        source="Robbins and Monro, A Stochastic Approximation Method, 1951",
        max_workers=1,
    ),
    Strategy(
        name="mirrored",
        framework="torch",
        term="synchronous data parallelism (all-reduce)",
        summary="Each worker holds a copy of the model and takes a share of the batch. The "
        "gradients are averaged.",
        module="workbench.strategies.torch.mirrored:Mirrored",
        messages="workbench.catalog.step_messages:mirrored",
        suits="models that fit on one device, if computing the gradients takes longer than the "
        "all-reduce",
        shares_gpu=True,
        source="Li et al., PyTorch Distributed, VLDB 2020, section 3",
        aliases=("ddp", "data_parallel", "dp", "distributed_data_parallel", "horovod"),
        replicated=True,
        heals=True,
        sheds=True,
        exact_with=(("compress", "none"),),
        loses="the steps since the last checkpoint. With compression, each worker keeps the part "
        "of its gradient that it has not sent yet (the compression error), and adds this part to "
        "its next gradient. If the number of workers changes, these parts are lost too",
        links=True,
        options=(
            Option(
                "allreduce", "choice", "auto",
                choices=("auto", "backend", "ring", "hierarchical", "reduce_to_one",
                         "recursive_doubling"),
                help="all-reduce algorithm that adds up the gradients; `auto` measures the "
                "algorithms and chooses one; `backend` is the all-reduce of gloo or NCCL",
            ),
            Option(
                "compress", "str", "none", pattern=COMPRESSIONS,
                form="none, fp16, bf16, powersgd:RANK (1 or more), "
                "topk:FRACTION (more than 0, at most 1)",
                help="compresses the gradients, for example with fp16 or topk:0.01, so that fewer "
                "bytes are sent; the compression error is added to the next gradient",
            ),
            Option(
                "bucket_mb", "float", 25.0, minimum=0.001, maximum=4096,
                help="size of a bucket in MB. A bucket is a group of gradients that the backend "
                "averages together during the backward pass",
            ),
            Option(
                "find_unused_parameters", "bool", False,
                help="set `true` if there are steps in which the loss does not use some "
                "parameters; each step is then slower, because the unused parameters must be found",
            ),
            Option(
                "sync_batchnorm", "bool", False,
                help="computes BatchNorm's statistics over all workers (GPUs only)",
            ),
        ),
    ),
    Strategy(
        name="central_storage",
        framework="torch",
        term="synchronous training with central variables",
        summary="The parameters and the optimizer's state are on one server. Workers pull the "
        "parameters and push gradients.",
        module="workbench.strategies.torch.central_storage:CentralStorage",
        keeps="weights",
        messages="workbench.catalog.step_messages:central_storage",
        suits="a host with few devices; optimizers with a large state (the state is in the host's "
        "memory, not on the devices)",
        shares_gpu=True,
        sheds=True,
        source="Abadi et al., TensorFlow, OSDI 2016, section 4.4 (synchronous replicas)",
        aliases=("central",),
        servers=1,
        heals=True,
        copies_option="replicas",
        links=True,
        options=(
            Option(
                "replicas", "int", 1, minimum=1, maximum=2,
                help="how many servers store each part of the parameters; with 2, one server can "
                "die and no step is lost",
            ),
            Option(
                "link", "choice", "auto", choices=("auto", "shared_memory", "unix", "tcp"),
                help="how parameters and gradients are sent; `auto` takes the fastest way",
            ),
        ),
    ),
    Strategy(
        name="parameter_server",
        framework="torch",
        term="asynchronous data parallelism (parameter server)",
        summary="Servers hold the parameters. Each worker pulls parameters and pushes gradients at "
        "its own speed.",
        module="workbench.strategies.torch.parameter_server:ParameterServer",
        keeps="weights",
        messages="workbench.catalog.step_messages:parameter_server",
        suits="workers with different speeds; large embedding tables, if each step uses only a "
        "few rows; experiments with stale gradients",
        shares_gpu=True,
        sheds=True,
        source="Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI "
        "2014; Ho et al., Stale Synchronous Parallel, NIPS 2013",
        aliases=("ps", "pserver", "kvstore"),
        sync=False,
        heals=True,
        unhealed_with=(("consistency", "snapshot"),),
        servers_option="servers",
        copies_option="replicas",
        sync_option="sync",
        loses="the steps since the last checkpoint. With `sync=false` the run can lose more: "
        "all workers continue at the same step, the step of the worker that saved the checkpoint. "
        "A worker that had taken fewer steps than this worker skips the steps in between. A worker "
        "that had taken more steps repeats some steps",
        links=True,
        excludes=(
            ("sync", "max_staleness", "with sync=true, no gradient is stale"),
            ("sync", "staleness_aware_lr", "with sync=true, no gradient is stale"),
            ("sync", "pull_every", "with sync=true, workers pull the parameters in every step"),
            ("replicas", "consistency", "with consistency=snapshot, only server 0 knows which "
             "version all servers must send. So no other server can replace server 0"),
        ),
        spares_workers=True,
        options=(
            Option(
                "servers", "int", 1, minimum=1, maximum=64,
                help="number of servers; each server holds about the same number of bytes",
            ),
            Option(
                "max_staleness", "int", None, minimum=0, optional=True,
                help="how many steps the fastest worker can be ahead of the slowest; `none`: no "
                "limit",
            ),
            Option(
                "staleness_aware_lr", "bool", False,
                help="divides the learning rate of each push by the push's staleness, if the "
                "staleness is above 1",
            ),
            Option(
                "consistency", "choice", "latest", choices=("latest", "snapshot"),
                help="which parameters a worker pulls. `latest`: the newest parameters of each "
                "server. `snapshot`: parameters of the same version from all servers",
            ),
            Option(
                "pull_every", "int", 1, minimum=1,
                help="number of steps that a worker computes before it pulls the parameters again",
            ),
            Option(
                "sync", "bool", False,
                help="each step uses the gradients of all workers (bulk synchronous parallel); the "
                "result is the same as on one device",
            ),
            Option(
                "replicas", "int", 1, minimum=1, maximum=2,
                help="how many servers store each part of the parameters; with 2, one server can "
                "die and no step is lost",
            ),
            Option(
                "link", "choice", "auto", choices=("auto", "shared_memory", "unix", "tcp"),
                help="how parameters and gradients are sent; `auto` takes the fastest way",
            ),
        ),
    ),
    Strategy(
        name="sharded",
        framework="torch",
        term="fully sharded data parallelism (ZeRO)",
        summary="Each of the n workers keeps 1/n of the parameters, gradients and optimizer state. "
        "Before the workers compute a layer, each worker gathers the layer's parameters from all "
        "workers.",
        module="workbench.strategies.torch.sharded:Sharded",
        keeps="part",
        messages="workbench.catalog.step_messages:sharded",
        suits="models whose parameters and optimizer state do not fit on one device",
        unhealed="each worker holds parameters that no other worker has",
        sheds=True,
        source="Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023",
        aliases=("fsdp", "fsdp2", "fully_sharded_data_parallel", "zero", "zero2", "zero3"),
        links=True,
        fills=True,
        ways=("fit",),
        supports=FIT_FEATURES - {"sparse_gradients"},
        options=(
            Option(
                "unit_mb", "float", 1.0, minimum=0, maximum=65536,
                help="layers with at least this many MB of parameters are gathered one after the "
                "other; all smaller layers are gathered together",
            ),
            Option(
                "reshard", "bool", True,
                help="`true`: after the forward pass, a worker keeps only its own part of each "
                "large layer, as in ZeRO-3. `false`: the whole layers stay in memory until the "
                "backward pass has used them. A layer is large if it has at least unit_mb MB",
            ),
            Option(
                "gather", "choice", "all", choices=("all", "first"),
                help="`all`: at the end, every worker gets the whole trained model; `first`: "
                "only rank 0 gets it",
            ),
        ),
    ),
    Strategy(
        name="model_split",
        framework="torch",
        term="pipeline (model) parallelism",
        summary="The model is cut into stages, one or more on each worker. The batch is divided "
        "into microbatches. Each microbatch goes from stage to stage.",
        module="workbench.strategies.torch.model_split:ModelSplit",
        keeps="part",
        messages="workbench.catalog.step_messages:model_split",
        suits="models that do not fit on one device and have layers of similar cost",
        unhealed="each worker holds a stage that no other worker has",
        source="Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019",
        aliases=("pipeline", "gpipe"),
        links=True,
        data_parallel=False,
        whole=False,
        takes_turns=True,
        rules="workbench.catalog.schedules:check_schedule",
        ways=("fit",),
        supports=FIT_FEATURES - {"accumulate", "compile", "own_data"},
        options=_PIPELINE_OPTIONS,
    ),
    Strategy(
        name="hybrid",
        framework="torch",
        term="data x model parallelism",
        summary="Several pipelines each take a share of the batch. The workers with the same "
        "stage add up their gradients.",
        module="workbench.strategies.torch.hybrid:Hybrid",
        keeps="part",
        messages="workbench.catalog.step_messages:hybrid",
        suits="models that do not fit on one device, if there are more workers than one pipeline "
        "needs",
        heals=True,
        copy_rule="workbench.catalog.schedules:pipeline_workers",
        source="Narayanan et al., PipeDream, SOSP 2019; Megatron-LM, SC 2021, section 3",
        aliases=("data_model",),
        links=True,
        whole=False,
        takes_turns=True,
        rules="workbench.catalog.schedules:check_schedule",
        ways=("fit",),
        supports=FIT_FEATURES - {"accumulate", "compile", "sparse_gradients", "own_data"},
        options=(
            Option(
                "stages", "int", None, minimum=1, maximum=4096, optional=True,
                help="number of workers in one pipeline; `none` means 2 if the number of workers "
                "is even, and otherwise 1",
            ),
            *_PIPELINE_OPTIONS,
        ),
    ),
    Strategy(
        name="tensor_parallel",
        framework="torch",
        term="tensor (intra-layer model) parallelism",
        summary="The weight matrices of a layer are divided among the workers, which compute the "
        "layer together.",
        module="workbench.strategies.torch.tensor_parallel:TensorParallel",
        keeps="part",
        messages="workbench.catalog.step_messages:tensor_parallel",
        suits="models with wide layers, on workers with fast links",
        unhealed="each worker holds a part of each divided layer, and no other worker has this "
        "part",
        source="Shoeybi et al., Megatron-LM, 2019, section 3",
        aliases=("tp", "megatron"),
        links=True,
        data_parallel=False,
        ways=("fit",),
        supports=FIT_FEATURES - {"compile", "sparse_gradients", "own_data"},
        options=(
            Option(
                "plan", "str", "auto",
                help="how layers are divided: `auto`, or NAME=STYLE for each layer, for example "
                "fc1=col,fc2=row; in NAME, * matches any text. Styles: `col` divides the layer "
                "by columns; each worker keeps its part of the output. `row` divides the layer "
                "by rows; use `row` after a `col` or `heads` layer, because the input must already "
                "be divided among the workers. `gathered` divides the layer by columns; every "
                "worker gets the whole output. `split_row` divides the layer by rows; the input is "
                "not divided. `heads` divides the layer like `col`; use `heads` if the code "
                "reshapes the output into attention heads",
            ),
            Option(
                "gather", "choice", "all", choices=("all", "first"),
                help="`all`: at the end, every worker gets the whole trained model; `first`: "
                "only rank 0 gets it",
            ),
        ),
    ),
    Strategy(
        name="local_sgd",
        framework="torch",
        term="local SGD (federated averaging, DiLoCo)",
        summary="Workers train alone for some steps. Then they average their parameters, or take "
        "a step towards this average (DiLoCo).",
        module="workbench.strategies.torch.local_sgd:LocalSGD",
        messages="workbench.catalog.step_messages:local_sgd",
        cadence="workers wait for each other only in steps in which they average their parameters",
        suits="slow links, and data that must stay on its host",
        shares_gpu=True,
        source="Stich, Local SGD, ICLR 2019; McMahan et al., federated averaging, AISTATS 2017; "
        "Douillard et al., DiLoCo, 2023 (arXiv:2311.08105)",
        aliases=("fedavg",),
        supports=FIT_FEATURES - {"clip_norm"},
        exact_with=(("every", 1),),
        heals=True,
        dies_with="the steps that the dead worker took since the workers last averaged their "
        "parameters, and the state of the dead worker's optimizer",
        loses="the steps since the last checkpoint. If the number of workers changes, all replicas "
        "start from their mean, so the differences between the replicas are lost too",
        linear_only=True,
        links=True,
        excludes=(
            ("fragments", "fraction", "`fraction` chooses workers for each round, and a round must "
             "then end with an average of all parameters. With `fragments`, an average contains "
             "only a part of the parameters"),
        ),
        rules="workbench.catalog.schedules:check_turns",
        options=(
            Option(
                "every", "int", 8, minimum=1,
                help="number of steps in a round; workers average all parameters once in each "
                "round. If every=1, the optimizer is SGD, and all other options have their "
                "defaults, the result is the same as on one device, except for rounding errors",
            ),
            Option(
                "outer", "choice", "average", choices=("average", "nesterov"),
                help="how workers use the mean of their parameters at the end of a round. "
                "`average`: they continue from this mean. `nesterov` (DiLoCo): they go back to "
                "the parameters from the start of the round. From there they take one step, with "
                "momentum, towards this mean. This step is called the outer step",
            ),
            Option(
                "outer_lr", "float", 0.7, minimum=0.001, maximum=10,
                only_with=("outer", "nesterov"),
                help="learning rate of the outer step (outer=nesterov). With outer_lr=1 and "
                "outer_momentum=0, outer=nesterov gives the same result as outer=average",
            ),
            Option(
                "outer_momentum", "float", 0.9, minimum=0, maximum=0.999,
                only_with=("outer", "nesterov"),
                help="Nesterov momentum of the outer step (outer=nesterov); 0: no momentum",
            ),
            Option(
                "fragments", "int", 1, minimum=1, maximum=64,
                help="number of parts into which the parameters are divided; the parts are "
                "averaged one after the other, so that each message is smaller",
            ),
            Option(
                "fraction", "float", 1.0, minimum=0.001, maximum=1,
                help="fraction of the workers that is chosen at random for each round; the other "
                "workers do not take part",
            ),
            Option(
                "skew", "float", None, minimum=0.001, optional=True,
                help="how evenly the samples of each class are divided among the workers. 0.1: "
                "very unevenly; 100: nearly evenly; `none`: evenly. The number is the alpha of a "
                "Dirichlet distribution",
            ),
        ),
    ),
    Strategy(
        name="gossip",
        framework="torch",
        term="decentralised SGD (gossip)",
        summary="There is no server. After each step a worker averages its parameters with those "
        "of its neighbours.",
        module="workbench.strategies.torch.gossip:Gossip",
        messages="workbench.catalog.step_messages:gossip",
        cadence="a worker waits only for its neighbours",
        suits="runs with many workers, if an all-reduce over their links is slow; experiments with "
        "replicas that differ",
        source="Lian et al., D-PSGD, NIPS 2017; Ying et al., exponential graphs, NeurIPS 2021",
        aliases=("decentralised", "decentralized"),
        supports=FIT_FEATURES - {"clip_norm"},
        exact_with=None,
        heals=True,
        dies_with="the steps that the dead worker took since its neighbours last received its "
        "parameters, and the state of the dead worker's optimizer",
        loses="the steps since the last checkpoint. If the number of workers changes, all replicas "
        "start from their mean, so the differences between the replicas are lost too",
        links=True,
        options=(
            Option(
                "graph", "choice", "ring", choices=("ring", "exponential"),
                help="the workers with which a worker averages its parameters. All workers form a "
                "ring. `ring`: its two neighbours. `exponential`: one other worker in each step. "
                "In the first step this other worker is 1 place away in the ring, then 2 places, "
                "then 4, and so on. After the largest distance, the distance is 1 again",
            ),
            Option(
                "spread_every", "int", 10, minimum=1,
                help="number of steps between two measurements of the replica spread (how much the "
                "replicas differ)",
            ),
        ),
    ),
)  # fmt: skip


_TENSORFLOW_WAYS: tuple[Way, ...] = ("keras", "loop", "fit")
_COMPILED_FEATURES = FIT_FEATURES - {"own_data"}
_TENSORFLOW_FEATURES = _COMPILED_FEATURES - {"compile"}
_COORDINATED_FEATURES = _TENSORFLOW_FEATURES - {"scheduler"}  # its steps have no order

TENSORFLOW: tuple[Strategy, ...] = (
    Strategy(
        name="one_device",
        framework="tensorflow",
        term="single-device training",
        summary="One replica does all the work. Other strategies are compared with this strategy.",
        module="workbench.strategies.tensorflow.one_device:OneDevice",
        messages="workbench.catalog.step_messages:tensorflow_one_device",
        suits="models that fit on one device; a baseline for other strategies",
        shares_gpu=True,
        source="tf.distribute.OneDeviceStrategy; Robbins and Monro, 1951",
        ways=_TENSORFLOW_WAYS,
        supports=_COMPILED_FEATURES,
        max_workers=1,
        one_engine=True,
    ),
    Strategy(
        name="mirrored",
        framework="tensorflow",
        term="synchronous data parallelism (all-reduce)",
        summary="One engine holds a replica on each of its devices. Each replica takes a share "
        "of the batch; the gradients are added up.",
        module="workbench.strategies.tensorflow.mirrored:Mirrored",
        messages="workbench.catalog.step_messages:tensorflow_mirrored",
        suits="several GPUs of one host, and models that fit on each GPU",
        source="tf.distribute.MirroredStrategy; Abadi et al., TensorFlow, OSDI 2016, section 4.4",
        aliases=("data_parallel", "dp", "horovod"),
        ways=_TENSORFLOW_WAYS,
        supports=_COMPILED_FEATURES,
        one_engine=True,
        # In a ring of CPUs, a process can build only one strategy. The keys of its collectives stay
        # in use, so a second strategy fails because its shapes differ.
        needs_gpus=(("cross_device_ops", "nccl"), ("cross_device_ops", "ring")),
        options=(
            Option(
                "cross_device_ops", "choice", "auto",
                choices=("auto", "nccl", "hierarchical", "reduce_to_one", "ring"),
                help="how gradients are added up over the devices. `auto` is nccl on GPUs, and "
                "reduce_to_one on other devices. nccl and ring need GPUs",
            ),
        ),
    ),
    Strategy(
        name="multi_worker_mirrored",
        framework="tensorflow",
        term="synchronous data parallelism over several engines (all-reduce)",
        summary="Each worker is an engine with a full copy of the parameters. The engines add up "
        "their gradients with an all-reduce.",
        module="workbench.strategies.tensorflow.multi_worker_mirrored:MultiWorkerMirrored",
        messages="workbench.catalog.step_messages:multi_worker_mirrored",
        suits="one process for each GPU, on one host or several hosts",
        source="tf.distribute.MultiWorkerMirroredStrategy; Patarasuk and Yuan, JPDC 2009",
        aliases=("multi_worker",),
        ways=_TENSORFLOW_WAYS,
        supports=_COMPILED_FEATURES,
        options=(
            Option(
                "communication", "choice", "auto", choices=("auto", "ring", "nccl"),
                help="how gradients are sent; `auto`: nccl between GPUs, otherwise a ring over "
                "gRPC",
            ),
            Option(
                "timeout_s", "float", 120.0, minimum=1.0, maximum=3600.0,
                help="seconds after which a worker stops waiting for the other workers",
            ),
        ),
    ),
    Strategy(
        name="central_storage",
        framework="tensorflow",
        term="synchronous data parallelism, parameters on one device",
        summary="Parameters and optimizer are on one device of the engine. In each step, this "
        "device adds up the gradients of all devices and updates the parameters.",
        module="workbench.strategies.tensorflow.central_storage:CentralStorage",
        keeps="weights",
        messages="workbench.catalog.step_messages:tensorflow_central_storage",
        suits="several devices of one host, if parameters and optimizer state need too much "
        "memory to be stored on every device",
        source="tf.distribute.experimental.CentralStorageStrategy; Li et al., Scaling Distributed "
        "Machine Learning with the Parameter Server, OSDI 2014",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        options=(
            Option(
                "parameter_device", "choice", "auto", choices=("auto", "cpu"),
                help="where the parameters are; `auto`: on the first device; `cpu`: in the "
                "host's memory",
            ),
        ),
    ),
    Strategy(
        name="model_split",
        framework="tensorflow",
        term="model parallelism, one stage after the other",
        summary="The layers of one model are on several devices, and each batch passes through "
        "all these devices. The strategy saves memory, not time.",
        module="workbench.strategies.tensorflow.model_split:ModelSplit",
        keeps="part",
        messages="workbench.catalog.step_messages:tensorflow_model_split",
        suits="models that are too large for one device, and lessons that show why pipelines exist",
        source="Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; tf.device",
        ways=_TENSORFLOW_WAYS,
        supports=_TENSORFLOW_FEATURES,
        one_engine=True,
        data_parallel=False,
        takes_turns=True,
        options=(
            Option(
                "split_at", "str", None, optional=True,
                help="list of the layers at which a new stage begins: their names (conv2,fc1) or "
                "their numbers (2,5). `none`: Workbench chooses stages with similar numbers of "
                "parameters",
            ),
        ),
    ),
    Strategy(
        name="tpu",
        framework="tensorflow",
        term="synchronous data parallelism on TPU cores",
        summary="Each core of a TPU has a replica. The gradients are added up over the TPU's "
        "links.",
        module="workbench.strategies.tensorflow.tpu:Tpu",
        messages="workbench.catalog.step_messages:tpu",
        suits="a TPU (this strategy was never run on a TPU; tests check only its error messages)",
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
        summary="Servers hold the variables. A coordinator gives each step to a worker that has "
        "nothing to do.",
        module="workbench.strategies.tensorflow.parameter_server:ParameterServer",
        keeps="weights",
        messages="workbench.catalog.step_messages:tensorflow_parameter_server",
        suits="workers with different speeds; large embedding tables, if each step uses only a "
        "few rows; experiments with stale gradients",
        shares_gpu=True,
        source="tf.distribute.ParameterServerStrategy; Li et al., Parameter Server, OSDI 2014",
        aliases=("ps", "pserver", "kvstore"),
        ways=_TENSORFLOW_WAYS,
        supports=_COORDINATED_FEATURES,
        sync=False,
        one_engine=True,
        remote_workers=True,
        loses="the steps since the last checkpoint; before a checkpoint is saved, Workbench waits "
        "until all pushes have arrived",
        servers_option="servers",
        exact_with=None,
        options=(
            Option(
                "servers", "int", 1, minimum=1, maximum=64,
                help="number of servers; TensorFlow places the variables on the servers in turn",
            ),
            Option(
                "partitioner", "str", "none", pattern=r"none|fixed:0*[1-9]\d*|min_size:0*[1-9]\d*",
                form="none, fixed:PARTS, min_size:BYTES",
                help="only for your own training loop: cuts each variable into parts, and divides "
                "the parts among the servers",
            ),
        ),
    ),
)  # fmt: skip
