from types import SimpleNamespace

import pytest

from workbench.devices import leases as devices
from workbench.devices import mask
from workbench.devices.discovery import Device, discover
from workbench.errors import ClusterError, PlanError

GIB = 1 << 30


class NVMLError(Exception):
    pass


class FakeNvml:
    """What of pynvml `discover` uses, for GPUs given as (name, used GiB, uuid)."""

    def __init__(self, gpus, *, broken=False):
        self.gpus, self.open = gpus, 0
        self.NVMLError = NVMLError
        self.nvmlInit = self.fail if broken else self.start
        self.nvmlShutdown = self.stop
        self.nvmlDeviceGetCount = lambda: len(gpus)
        self.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
        self.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(
            total=80 * GIB, used=gpu[1] * GIB
        )
        self.nvmlDeviceGetName = lambda gpu: gpu[0].encode()
        self.nvmlDeviceGetUUID = lambda gpu: gpu[2]

    def fail(self):
        raise NVMLError("driver not loaded")

    def start(self):
        self.open += 1

    def stop(self):
        self.open -= 1


@pytest.fixture
def nvml(monkeypatch):
    def install(count=4, used=(5, 1, 3, 1), **kwargs):
        fake = FakeNvml([(f"H{i}", used[i], f"GPU-{i}{i}{i}-x") for i in range(count)], **kwargs)
        monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
        return fake

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def found(*used):
    return [Device(i, "H200", 80 * GIB, u, f"GPU-{i}") for i, u in enumerate(used)]


def test_discover_lists_gpus_with_memory_and_closes_nvml(nvml):
    fake = nvml()
    gpus = discover()
    assert [(g.index, g.name, g.used_bytes // GIB) for g in gpus] == [
        (0, "H0", 5), (1, "H1", 1), (2, "H2", 3), (3, "H3", 1),
    ]  # fmt: skip
    assert fake.open == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,0", ["H2", "H0"]),
        ("GPU-333-x,1", ["H3", "H1"]),
        ("GPU-1", ["H1"]),  # CUDA takes unambiguous prefixes
        ("", []),
        ("-1", []),
        ("1,9,0", ["H1"]),  # CUDA stops at the first that does not exist
        ("1,1", ["H1"]),
    ],
)
def test_discover_obeys_cuda_visible_devices_as_cuda_does(nvml, monkeypatch, visible, names):
    nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = discover()
    assert [g.name for g in gpus] == names
    assert [g.index for g in gpus] == list(range(len(names)))


def test_discover_is_empty_where_the_driver_is_missing(nvml):
    nvml(broken=True)
    assert discover() == []


def test_auto_takes_the_least_used_gpus_first(nvml):
    nvml()
    assert devices.parse_devices("auto") == (1, 3, 2, 0)


def test_auto_falls_back_to_the_cpu_but_cuda_does_not():
    assert devices.parse_devices("auto", []) == "cpu"
    with pytest.raises(ClusterError, match="WB-CLUSTER-004"):
        devices.parse_devices("cuda", [])


@pytest.mark.parametrize("given", ["1, 0", "cuda:1,cuda:0", [1, 0], (1, 0)])
def test_named_gpus_keep_their_order(given):
    given_out = devices.lease(given, 2, found(9, 1))
    assert given_out.gpus == ("GPU-1", "GPU-0")
    assert [one.device for one in given_out.leases] == ["cuda:0", "cuda:1"]
    assert given_out.backend == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("given", ["0,7", "0,0", [3]])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(given):
    with pytest.raises(PlanError, match=r"WB-PLAN-024[\s\S]*0, 1"):
        devices.parse_devices(given, found(0, 0))


@pytest.mark.parametrize("given", ["gpu", "0;1", "", "cuda0"])
def test_words_that_are_not_understood_are_refused(given):
    with pytest.raises(PlanError, match="WB-PLAN-025"):
        devices.parse_devices(given, found(0))


def test_more_workers_than_gpus_share_them_and_say_so():
    given_out = devices.lease("cuda", 3, found(0, 0))
    assert [one.device for one in given_out.leases] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [one.sharers for one in given_out.leases] == [2, 1, 2]
    assert "3 workers share 2 GPUs" in given_out.warning
    assert given_out.backend == "gloo"


def test_workers_with_a_gpu_each_get_no_warning():
    given_out = devices.lease("auto", 2, found(4, 0, 2))
    assert given_out.gpus == ("GPU-1", "GPU-2")
    assert [one.device for one in given_out.leases] == ["cuda:0", "cuda:1"]
    assert given_out.warning == ""


def test_cpu_needs_no_nvml(nvml):
    fake = nvml(broken=True)
    given_out = devices.lease("cpu", 2)
    assert [one.device for one in given_out.leases] == ["cpu", "cpu"]
    assert given_out.backend == "gloo"
    assert fake.open == 0


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 8, 8), (3, 8, 2), (8, 8, 1), (9, 8, 1)]
)
def test_threads_divide_the_cores_and_never_reach_zero(workers, cores, threads):
    assert devices.threads_per_worker(workers, cores) == threads


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_containers_quota_limits_the_cores(monkeypatch, tmp_path, text, cores):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(devices, "CGROUP_V2", quota)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert devices.cpu_count() == cores


def test_an_older_cgroups_quota_limits_the_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.cfs_quota_us").write_text("300000")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    monkeypatch.setattr(devices, "CGROUP_V2", tmp_path / "none")
    monkeypatch.setattr(devices, "CGROUP_V1", tmp_path)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert devices.cpu_count() == 3


@pytest.mark.parametrize(
    ("visible", "limit", "expected"),
    [
        (None, "1,2", [(1, "H1"), (2, "H2")]),
        ("3,2,1", "1,2", [(1, "H2"), (2, "H1")]),  # numbers as CUDA counts; the limit is NVML's
        ("3", "1,2", []),
        (None, "GPU-333", [(3, "H3")]),
        (None, "cpu", []),
        (None, "all", [(0, "H0"), (1, "H1"), (2, "H2"), (3, "H3")]),
    ],
)
def test_the_administrators_limit_counts_as_nvml_does(nvml, monkeypatch, visible, limit, expected):
    nvml()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("WORKBENCH_DEVICES", limit)
    assert [(gpu.index, gpu.name) for gpu in discover()] == expected


def test_a_gpu_beyond_the_limit_is_refused_by_name_of_the_limit(nvml, monkeypatch):
    nvml()
    monkeypatch.setenv("WORKBENCH_DEVICES", "1")
    with pytest.raises(PlanError, match=r"WB-PLAN-024[\s\S]*WORKBENCH_DEVICES"):
        devices.parse_devices("0")
    monkeypatch.setenv("WORKBENCH_DEVICES", "cpu")
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-004[\s\S]*WORKBENCH"):
        devices.parse_devices("cuda")
    assert devices.parse_devices("auto") == "cpu"


def test_the_mask_is_the_list_and_its_order_by_bus():
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    mask.apply("cuda", ("GPU-b", "GPU-a"), environment)
    assert environment == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    mask.apply("cuda", (), environment)  # of a run on CPUs: what was there stays
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_amds_mask_is_set_once_and_not_counted_twice():
    environment = {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}
    mask.apply("rocm", ("GPU-1f", "GPU-2f"), environment)
    assert environment == {"ROCR_VISIBLE_DEVICES": "GPU-1f,GPU-2f"}


@pytest.mark.parametrize(
    ("held", "wanted", "fits"),
    [
        ("GPU-a,GPU-b", ("GPU-a",), True),
        ("GPU-a,GPU-b", ("GPU-a", "GPU-b"), True),
        ("GPU-a,GPU-b", ("GPU-b",), False),
        ("GPU-a", ("GPU-a", "GPU-b"), False),
        ("0,1", ("GPU-a",), False),
        ("GPU-a", (), True),
    ],
)
def test_an_initialised_process_goes_on_where_every_number_means_the_same(held, wanted, fits):
    assert mask.fits("cuda", wanted, {"CUDA_VISIBLE_DEVICES": held}) is fits
