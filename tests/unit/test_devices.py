"""Which devices are found, what is said of those that are not, and which worker gets which."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.nvml import GIB, FakeNvml, Gpu, only_fakes, pool_of

from workbench.devices import discovery, leases, mask
from workbench.devices.discovery import Build, Device, Survey, discover, survey
from workbench.errors import ClusterError, PlanError
from workbench.execution.requests import lease_of, make_specs
from workbench.shared import cluster_env

USED = (5, 1, 3, 1)


@pytest.fixture(autouse=True)
def nothing_but_the_fakes(monkeypatch, tmp_path):
    with only_fakes(monkeypatch, tmp_path):
        yield


def four(**changed: Gpu) -> list[Gpu]:
    """Four GPUs in use to different degrees; `gpu2=Gpu(...)` replaces one."""
    gpus = [Gpu(f"H{i}", f"GPU-{i}{i}{i}-x", used_gib=used) for i, used in enumerate(USED)]
    for name, gpu in changed.items():
        gpus[int(name[-1])] = gpu
    return gpus


def found(*used: int, **about) -> Survey:
    return Survey(tuple(
        Device(i, "H200", 80 * GIB, u, f"GPU-{i}", number=i, **about) for i, u in enumerate(used)
    ))  # fmt: skip


def devices_of(given: leases.Leases) -> list[str]:
    return [one.device for one in given.leases]


# -- what there is ---------------------------------------------------------------------------------


def test_discover_lists_gpus_with_memory_and_closes_nvml(monkeypatch):
    fake = FakeNvml(four()).install(monkeypatch)
    assert [(g.index, g.name, g.used_bytes // GIB) for g in discover()] == [
        (0, "H0", 5), (1, "H1", 1), (2, "H2", 3), (3, "H3", 1),
    ]  # fmt: skip
    assert fake.open == 0


@pytest.mark.parametrize("error", ["NotSupported", "NoPermission", "Unknown"])
def test_a_figure_that_one_gpu_does_not_tell_costs_that_figure_only(monkeypatch, error):
    quiet = Gpu("GB10", errors={"nvmlDeviceGetMemoryInfo": error, "nvmlDeviceGetName": error})
    FakeNvml(four(gpu2=quiet)).install(monkeypatch)
    gpus = discover()
    assert [g.memory_bytes for g in gpus] == [80 * GIB, 80 * GIB, None, 80 * GIB]
    assert gpus[2].name == "NVIDIA GPU"
    assert leases.lease("auto", 4).gpus == tuple(gpu.uuid for gpu in gpus)


def test_gpus_without_permanent_names_go_by_their_numbers_on_the_bus(monkeypatch):
    FakeNvml([Gpu("A"), Gpu("B", errors={"nvmlDeviceGetUUID": "NotSupported"})]).install(
        monkeypatch
    )
    assert leases.lease("1,0", 2).gpus == ("1", "0")


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
def test_a_gpu_that_fell_off_the_bus_is_left_out_by_name_and_the_others_stay(monkeypatch, function):
    FakeNvml(four(gpu3=Gpu("H3", errors={function: "GpuIsLost"}))).install(monkeypatch)
    seen = survey()
    assert [gpu.name for gpu in seen.devices] == ["H0", "H1", "H2"]
    (note,) = seen.notes
    assert all(told in note for told in ("GPU 3", "'GPU is lost'"))


def test_a_gpu_in_mig_mode_is_its_instances(monkeypatch):
    cut = Gpu("A100", mig=[Gpu("A100 1g", "MIG-a", total_gib=10), Gpu("A100 2g", "MIG-b")])
    FakeNvml([Gpu("H0"), cut]).install(monkeypatch)
    gpus = discover()
    assert [(gpu.index, gpu.uuid, gpu.place) for gpu in gpus] == [
        (0, "GPU-000-x", "GPU 0"), (1, "MIG-a", "GPU 1 MIG 0"), (2, "MIG-b", "GPU 1 MIG 1"),
    ]  # fmt: skip
    assert gpus[1].memory_bytes == 10 * GIB


def test_instances_that_nobody_may_see_are_said(monkeypatch):
    locked = Gpu(
        "A100", mig=[Gpu()], errors={"nvmlDeviceGetMigDeviceHandleByIndex": "NoPermission"}
    )
    FakeNvml([Gpu("H0"), locked]).install(monkeypatch)
    seen = survey()
    assert [gpu.name for gpu in seen.devices] == ["H0"]
    assert all(told in seen.notes[0] for told in ("GPU 1", "MIG"))
    assert "Insufficient Permissions" in seen.notes[0]


def test_a_gpu_that_may_not_compute_is_left_out_and_said(monkeypatch):
    FakeNvml([Gpu("H0", mode="prohibited"), Gpu("H1", mode="exclusive")]).install(monkeypatch)
    seen = survey()
    assert [(gpu.name, gpu.exclusive) for gpu in seen.devices] == [("H1", True)]
    assert "PROHIBITED" in seen.notes[0]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,0", ["H2", "H0"]),
        ("GPU-333-x,1", ["H3", "H1"]),
        ("GPU-1", ["H1"]),  # CUDA takes unambiguous prefixes
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,0", ["H1"]),  # CUDA stops at the first that does not exist
        ("1,1", []),  # as `torch.cuda._parse_visible_devices` says
        ("0,1,0", []),
        ("MIG-not-there", []),
    ],
)
def test_discover_obeys_cuda_visible_devices_as_cuda_does(monkeypatch, visible, names):
    FakeNvml(four()).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = discover()
    assert [g.name for g in gpus] == names
    assert [g.index for g in gpus] == list(range(len(names)))


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [("MIG-b", ["MIG-b"]), ("MIG-b,MIG-a", ["MIG-b", "MIG-a"]), ("1", ["MIG-a", "MIG-b"])],
)
def test_mig_instances_are_named_as_slurm_and_kubernetes_do(monkeypatch, visible, uuids):
    FakeNvml([Gpu(), Gpu(mig=[Gpu(uuid="MIG-a"), Gpu(uuid="MIG-b")])]).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in discover()] == uuids


def test_a_name_that_is_not_there_is_said_but_hidden_gpus_are_not(monkeypatch):
    FakeNvml(four()).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,9,0")
    assert any("contains 9" in note for note in survey().notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,0")
    assert any("contains 0 twice" in note for note in survey().notes)
    for hidden in ("", "-1", "NoDevFiles", "2,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert [note for note in survey().notes if "contains" in note] == []


@pytest.mark.parametrize(
    ("order", "visible", "alike", "noted"),
    [
        ("", "1", False, True),
        ("FASTEST_FIRST", "1", False, True),
        ("PCI_BUS_ID", "1", False, False),
        ("", "1", True, False),
        ("", "GPU-111-x", False, False),
    ],
)
def test_numbers_that_cuda_counts_otherwise_are_said(monkeypatch, order, visible, alike, noted):
    gpus = [Gpu("RTX 4090", "GPU-000-x"), Gpu("RTX 4090" if alike else "GT 1030", "GPU-111-x")]
    FakeNvml(gpus).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert any("PCI_BUS_ID" in note for note in survey().notes) is noted


@pytest.mark.parametrize("file", ["nvidia0", "dxg", "nvmap"])
def test_a_driver_whose_gpus_cannot_be_counted_is_never_silent(monkeypatch, file):
    FakeNvml(broken="LibraryNotFound").install(monkeypatch)
    assert survey("torch") == Survey()  # a machine without GPUs
    discovery.DEV.mkdir()
    (discovery.DEV / file).touch()
    (note,) = survey("torch").notes
    assert str(discovery.DEV / file) in note
    assert "NVML Shared Library Not Found" in note
    pool = pool_of("auto", "torch")
    held, said = pool.hold(2, {})
    assert (devices_of(held), said) == (["cpu", "cpu"], [note])
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-004[\s\S]*Library Not Found"):
        leases.DevicePool("cuda", "torch").lease(1)


@pytest.mark.parametrize(
    ("build", "driver", "words"),
    [
        (Build("2.9+cpu"), 12080, "CUDA"),
        (Build("2.11", cuda="13.0"), 12020, "CUDA 13.0"),
        (Build("2.9", cuda="12.8"), 12020, ""),  # the same major: minor versions are compatible
        (Build("2.9", cuda="12.8"), 13000, ""),
        (None, 11000, ""),
    ],
)
def test_gpus_that_the_installed_torch_cannot_use_are_not_leased(monkeypatch, build, driver, words):
    FakeNvml([Gpu(), Gpu()], cuda=driver).install(monkeypatch)
    monkeypatch.setattr(discovery, "torch_build", lambda: build)
    seen = survey("torch")
    assert len(seen.devices) == (0 if words else 2)
    assert words in " ".join(seen.notes)
    assert len(survey("tensorflow").devices) == 2
    if words:
        with pytest.raises(ClusterError, match="WB-CLUSTER-004") as caught:
            leases.DevicePool("0", "torch").lease(1)
        assert words in str(caught.value)


def test_what_torch_is_built_for_is_read_without_importing_it(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.11.0+cu130'\ndebug = False\n"
        "cuda: Optional[str] = '13.0'\ngit_version = 'ab'\nhip: Optional[str] = None\n"
    )
    code = "from workbench.devices.discovery import torch_build; print(torch_build())"
    root = str(Path(discovery.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "Build(version='2.11.0+cu130', cuda='13.0', hip='')"


def test_the_made_up_driver_is_found_by_processes_that_are_started(monkeypatch):
    fake = FakeNvml(
        [Gpu("H0", mig=[Gpu(uuid="MIG-a")]), Gpu("H1", errors={"nvmlDeviceGetName": "Unknown"})]
    )
    root = str(Path(discovery.__file__).parents[2])
    code = "from workbench.devices.discovery import discover\nprint([g.uuid for g in discover()])"
    environment = fake.environment({**os.environ, "PYTHONPATH": root})
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "['MIG-a', 'GPU-111-x']"


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
def test_the_administrators_limit_counts_as_nvml_does(monkeypatch, visible, limit, expected):
    FakeNvml(four()).install(monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("WORKBENCH_DEVICES", limit)
    assert [(gpu.index, gpu.name) for gpu in discover()] == expected


def test_a_limit_names_a_gpu_and_means_its_instances(monkeypatch):
    FakeNvml([Gpu(), Gpu(uuid="GPU-b", mig=[Gpu(uuid="MIG-a")])]).install(monkeypatch)
    monkeypatch.setenv("WORKBENCH_DEVICES", "GPU-b")
    assert [gpu.uuid for gpu in discover()] == ["MIG-a"]


def test_a_gpu_beyond_the_limit_is_refused_by_name_of_the_limit(monkeypatch):
    FakeNvml(four()).install(monkeypatch)
    monkeypatch.setenv("WORKBENCH_DEVICES", "1")
    with pytest.raises(PlanError, match=r"WB-PLAN-024[\s\S]*WORKBENCH_DEVICES"):
        leases.lease("0", 1)
    monkeypatch.setenv("WORKBENCH_DEVICES", "cpu")
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-004[\s\S]*WORKBENCH"):
        leases.lease("cuda", 1)
    assert devices_of(leases.lease("auto", 1)) == ["cpu"]


def test_amds_gpus_are_counted_in_the_kernels_list(monkeypatch, tmp_path):
    FakeNvml(broken="LibraryNotFound").install(monkeypatch)
    monkeypatch.setattr(discovery, "torch_build", lambda: Build("2.9", hip="6.4"))
    monkeypatch.setattr(discovery, "DRM", tmp_path / "drm")
    for node, (simd, name) in enumerate([(0, 0), (416, 0x1F), (416, 0)]):
        folder = discovery.KFD / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(
            f"cpu_cores_count 8\nsimd_count {simd}\nunique_id {name}\n"
            f"drm_render_minor {127 + node}\n"
        )
        card = tmp_path / "drm" / f"renderD{127 + node}" / "device"
        card.mkdir(parents=True)
        (card / "mem_info_vram_total").write_text(f"{192 * GIB}\n")
        (card / "mem_info_vram_used").write_text(f"{node * GIB}\n")
    gpus = discover()
    assert [(g.kind, g.uuid, g.memory_bytes // GIB, g.used_bytes // GIB) for g in gpus] == [
        ("rocm", "GPU-000000000000001f", 192, 1), ("rocm", "1", 192, 2),
    ]  # fmt: skip
    given = leases.lease("auto", 2)
    assert (devices_of(given), given.backend) == (["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(discovery, "torch_build", lambda: Build("2.9", cuda="12.8"))
    assert "ROCm" in survey("torch").notes[0]


# -- who gets which --------------------------------------------------------------------------------


def test_auto_takes_the_least_used_set_and_orders_it_by_number(monkeypatch):
    FakeNvml(four()).install(monkeypatch)
    assert leases.lease("auto", 2).gpus == ("GPU-111-x", "GPU-333-x")
    assert leases.lease("auto", 3).gpus == ("GPU-111-x", "GPU-222-x", "GPU-333-x")


def test_who_computes_there_counts_more_than_bytes(monkeypatch):
    busy = Gpu("H1", "GPU-111-x", used_gib=0, processes=[(4242, None)])
    FakeNvml(four(gpu1=busy)).install(monkeypatch)
    assert leases.lease("auto", 2).gpus == ("GPU-222-x", "GPU-333-x")
    own = leases.choose("auto", 2, survey(), own=[4242])
    assert [gpu.name for gpu in own.gpus] == ["H1", "H3"]


@pytest.mark.parametrize(
    ("asked", "visible", "gpus"),
    [
        ("auto", "", ("GPU-111-x", "GPU-333-x")),
        ("2,3", "", ("GPU-222-x", "GPU-333-x")),
        ("3, cuda:2", "", ("GPU-333-x", "GPU-222-x")),
        ("cuda", "GPU-222-x,GPU-000-x", ("GPU-222-x", "GPU-000-x")),
        ("1,0", "GPU-222-x,GPU-000-x", ("GPU-000-x", "GPU-222-x")),
    ],
)
def test_every_engine_sees_its_gpu_under_its_local_rank(monkeypatch, asked, visible, gpus):
    FakeNvml(four()).install(monkeypatch)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = leases.lease(asked, 2)
    specs = make_specs({0: "h", 1: "h"}, 2, given, store=None, framework="torch", prefix="p")
    if asked == "cuda":
        gpus = tuple(sorted(gpus, key=visible.split(",").index))
    for spec in specs.values():
        assert spec.device == f"cuda:{spec.local_rank}"
        assert (spec.gpus, spec.accelerator) == (gpus, "cuda")
        assert spec.backend == "cpu:gloo,cuda:nccl"
        environment: dict[str, str] = {}
        mask.apply(spec.accelerator, spec.gpus, environment)
        mine = environment["CUDA_VISIBLE_DEVICES"].split(",")[spec.local_rank]
        assert mine == given.leases[spec.rank].gpu == gpus[spec.rank]


def test_the_label_says_which_gpu_it_really_is(monkeypatch):
    FakeNvml(four()).install(monkeypatch)
    assert leases.lease("2,3", 2).leases[0].label == "cuda:0 H2 (GPU 2)"


def test_auto_falls_back_to_the_cpu_but_cuda_does_not():
    assert devices_of(leases.lease("auto", 2, Survey())) == ["cpu", "cpu"]
    with pytest.raises(ClusterError, match="WB-CLUSTER-004"):
        leases.lease("cuda", 1, Survey())


@pytest.mark.parametrize("given", ["1, 0", "cuda:1,cuda:0", [1, 0], (1, 0)])
def test_named_gpus_keep_their_order(given):
    given_out = leases.lease(given, 2, found(9, 1))
    assert given_out.gpus == ("GPU-1", "GPU-0")
    assert devices_of(given_out) == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("given", ["0,0", "cuda:1,1", [1, 0, 1]])
def test_a_gpu_that_is_named_twice_is_refused(given):
    with pytest.raises(PlanError, match="WB-PLAN-344"):
        leases.lease(given, 1, found(0, 0))


@pytest.mark.parametrize("given", ["7", "0,7", [3]])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(given):
    with pytest.raises(PlanError, match=r"WB-PLAN-024[\s\S]*0, 1"):
        leases.lease(given, 1, found(0, 0))


@pytest.mark.parametrize("given", ["gpu", "0;1", "", "cuda0", "²"])
def test_words_that_are_not_understood_are_refused(given):
    with pytest.raises(PlanError, match="WB-PLAN-025"):
        leases.parse_devices(given)


def test_auto_with_more_workers_than_gpus_computes_on_the_cpu_and_says_why():
    given = leases.lease("auto", 2, found(0))
    assert (devices_of(given), given.backend) == (["cpu", "cpu"], "gloo")
    assert re.search("2 workers.*1 GPU.* CPU.*-n 1.*--devices cuda", given.warning)
    assert devices_of(leases.lease("auto", 1, found(0))) == ["cuda:0"]  # one_device


def test_named_gpus_are_shared_with_a_word_about_it():
    given = leases.lease("cuda", 3, found(0, 0))
    assert devices_of(given) == ["cuda:0", "cuda:1", "cuda:0"]
    assert [one.sharers for one in given.leases] == [2, 1, 2]
    assert "3 workers share 2 GPUs" in given.warning
    assert given.backend == "gloo"
    specs = make_specs(dict.fromkeys(range(3), "h"), 3, given, store=None, framework="torch",
                       prefix="p")  # fmt: skip
    assert [spec.sharers for spec in specs.values()] == [2, 1, 2]


def test_workers_with_a_gpu_each_get_no_warning():
    given = leases.lease("auto", 2, found(4, 0, 2))
    assert given.gpus == ("GPU-1", "GPU-2")
    assert given.warning == ""


def test_mig_instances_are_shown_to_their_workers_alone_and_form_no_nccl_group(monkeypatch):
    parts = [Gpu(uuid="MIG-a"), Gpu(uuid="MIG-b")]
    FakeNvml([Gpu(mig=parts)]).install(monkeypatch)
    given = leases.lease("cuda", 2)
    assert (devices_of(given), given.backend) == (["cuda:0", "cuda:0"], "gloo")
    specs = make_specs({0: "h", 1: "h"}, 2, given, store=None, framework="torch", prefix="p")
    assert [spec.gpus for spec in specs.values()] == [("MIG-a",), ("MIG-b",)]
    auto = leases.lease("auto", 2)
    assert devices_of(auto) == ["cpu", "cpu"]
    assert "MIG instances" in auto.warning
    assert leases.lease("auto", 1).leases[0].gpu == "MIG-a"


def test_auto_prefers_whole_gpus(monkeypatch):
    FakeNvml([Gpu(mig=[Gpu(uuid="MIG-a")]), Gpu(used_gib=3), Gpu(used_gib=4)]).install(monkeypatch)
    assert leases.lease("auto", 2).gpus == ("GPU-111-x", "GPU-222-x")


def test_a_gpu_for_one_process_is_not_shared(monkeypatch):
    FakeNvml([Gpu(mode="exclusive")]).install(monkeypatch)
    pool = pool_of("cuda")
    with pytest.raises(PlanError, match=r"WB-PLAN-161[\s\S]*--devices cpu"):
        pool.hold(2, {})
    assert devices_of(pool.hold(1, {})[0]) == ["cuda:0"]


def test_auto_leaves_a_gpu_for_one_process_to_who_is_there(monkeypatch):
    taken = Gpu(mode="exclusive", processes=[(4242, None)])
    FakeNvml([taken, Gpu(used_gib=70)]).install(monkeypatch)
    assert leases.lease("auto", 1).gpus == ("GPU-111-x",)
    _, said = pool_of("0").hold(1, {})
    assert "(pid 4242)" in said[0]
    assert "EXCLUSIVE" not in " ".join(pool_of("0").hold(1, {0: 4242})[1])  # its own engine


def test_the_helpers_that_train_get_the_gpus_and_the_others_none():
    given = leases.lease("cuda", 2, found(0, 0, 0, 0))
    specs = make_specs(
        dict.fromkeys(range(4), "h"), 2, given, store=None, framework="tensorflow", prefix="p",
        one_engine=True, helpers=("worker 0", "worker 1", "server s0"), remote_workers=True,
    )  # fmt: skip
    assert [(spec.part, spec.device) for spec in specs.values()] == [
        ("", "cpu"), ("worker 0", "cuda:0"), ("worker 1", "cuda:1"), ("server s0", "cpu"),
    ]  # fmt: skip
    assert specs[0].devices == ("cuda:0", "cuda:1")  # of the replicas, which are elsewhere
    assert [spec.gpus_used for spec in specs.values()] == [0, 1, 2, 0]
    assert [lease_of(spec, given).gpu for spec in specs.values()] == ["", "GPU-0", "GPU-1", ""]


def test_cpu_needs_no_nvml(monkeypatch):
    fake = FakeNvml(broken="Unknown").install(monkeypatch)
    given_out = leases.lease("cpu", 2)
    assert devices_of(given_out) == ["cpu", "cpu"]
    assert given_out.backend == "gloo"
    assert fake.asked == []


# -- cores, masks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 8, 8), (3, 8, 2), (8, 8, 1), (9, 8, 1)]
)
def test_threads_divide_the_cores_and_never_reach_zero(monkeypatch, workers, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert leases.threads_per_worker(workers, cores) == threads


@pytest.mark.parametrize(
    ("value", "torchrun", "threads"),
    [("3", False, 3), ("3,2", False, 3), ("1", False, 1), ("many", False, 4), ("0", False, 4),
     ("1", True, 4), ("3", True, 3)],
)  # fmt: skip
def test_the_users_number_of_threads_counts(monkeypatch, value, torchrun, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv(cluster_env.THREADS, raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert leases.threads_per_worker(2, 8) == threads
    monkeypatch.setenv(cluster_env.THREADS, "1")  # `workbench run` knows that the user set it
    assert leases.threads_per_worker(2, 8) == 1


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_containers_quota_limits_the_cores(monkeypatch, tmp_path, text, cores):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(leases, "CGROUP_V2", quota)
    monkeypatch.setattr(leases.os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert leases.cpu_count() == cores


def test_an_older_cgroups_quota_limits_the_cores(monkeypatch, tmp_path):
    (tmp_path / "cpu.cfs_quota_us").write_text("300000")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    monkeypatch.setattr(leases, "CGROUP_V2", tmp_path / "none")
    monkeypatch.setattr(leases, "CGROUP_V1", tmp_path)
    monkeypatch.setattr(leases.os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert leases.cpu_count() == 3


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
