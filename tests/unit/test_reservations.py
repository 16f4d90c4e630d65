"""Which GPUs a cluster holds, who else holds which, and when they are given back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.nvml import FakeNvml, Gpu, only_fakes, pool_of

from workbench.devices import leases, reservations
from workbench.errors import ClusterError


@pytest.fixture(autouse=True)
def nothing_but_the_fakes(monkeypatch, tmp_path):
    with only_fakes(monkeypatch, tmp_path):
        yield


def devices_of(given: leases.Leases) -> list[str]:
    return [one.device for one in given.leases]


def cluster(monkeypatch, asked="auto", gpus=4):
    FakeNvml([Gpu("H100", f"GPU-{i}") for i in range(gpus)]).install(monkeypatch)
    return pool_of(asked, notebook="mine.ipynb")


def test_two_notebooks_take_different_gpus_though_both_saw_the_same(monkeypatch):
    first, second = cluster(monkeypatch), cluster(monkeypatch)
    assert first.lease(2).gpus == second.lease(2).gpus == ("GPU-0", "GPU-1")
    assert first.hold(2, {0: 10})[0].gpus == ("GPU-0", "GPU-1")
    assert second.hold(2, {0: 20})[0].gpus == ("GPU-2", "GPU-3")
    third = cluster(monkeypatch)
    given, said = third.hold(1, {})
    assert devices_of(given) == ["cpu"]
    assert "GPU 0" in said[0]
    assert "mine.ipynb" in said[0]
    first.free()
    assert devices_of(third.hold(1, {})[0]) == ["cpu"]  # its variables are there
    third.free()
    assert third.hold(1, {})[0].gpus == ("GPU-0",)


def test_a_machine_without_gpus_is_looked_at_once(monkeypatch):
    fake = FakeNvml().install(monkeypatch)
    pool = pool_of("auto")
    pool.lease(2)
    asked = len(fake.asked)
    assert devices_of(pool.hold(2, {})[0]) == ["cpu", "cpu"]
    assert devices_of(pool.hold(2, {})[0]) == ["cpu", "cpu"]
    assert len(fake.asked) == asked


def test_a_named_gpu_that_somebody_holds_is_taken_with_a_word(monkeypatch):
    first, second = cluster(monkeypatch), cluster(monkeypatch, "0,2")
    first.hold(1, {})
    given, said = second.hold(2, {})
    assert given.gpus == ("GPU-0", "GPU-2")
    assert any("reserved by" in text and "H100 (GPU 0)" in text for text in said)
    assert set(reservations.holders()) == {"GPU-0", "GPU-2"}


def test_cuda_prefers_gpus_that_nobody_holds(monkeypatch):
    cluster(monkeypatch).hold(2, {})
    assert cluster(monkeypatch, "cuda").hold(2, {})[0].gpus == ("GPU-2", "GPU-3")


def test_ranks_keep_their_gpus_when_the_cluster_grows_and_shrinks(monkeypatch):
    pool = cluster(monkeypatch)
    one, _ = pool.hold(1, {0: 1, 1: 2}, most=2)
    assert (one.gpus, devices_of(one)) == (("GPU-0", "GPU-1"), ["cuda:0"])
    assert pool.hold(2, {0: 1, 1: 2})[0].gpus == ("GPU-0", "GPU-1")
    pool.lease(4)  # looked at only
    assert pool.lease(1).gpus == ("GPU-0", "GPU-1")
    assert pool.hold(3, {0: 1, 1: 2})[0].gpus == ("GPU-0", "GPU-1", "GPU-2")
    assert pool.lease(1).gpus == ("GPU-0", "GPU-1", "GPU-2")
    assert set(reservations.holders()) == {"GPU-0", "GPU-1", "GPU-2"}


def test_freed_gpus_are_for_others_and_engines_that_used_one_get_the_same_again(monkeypatch):
    pool, other = cluster(monkeypatch), cluster(monkeypatch)
    engines = {0: 100, 1: 101}
    pool.hold(2, engines)
    pool.told(engines)
    pool.free()
    assert pool.hold(2, engines)[0].gpus == ("GPU-0", "GPU-1")
    pool.free()
    assert other.hold(2, {})[0].gpus == ("GPU-0", "GPU-1")
    with pytest.raises(ClusterError, match=r"WB-CLUSTER-056[\s\S]*%cluster restart"):
        pool.hold(2, engines)
    with pytest.raises(ClusterError, match="WB-CLUSTER-056"):  # not GPU 2: they see 0 and 1
        pool.hold(1, engines)
    other.free()
    assert pool.hold(2, engines)[0].gpus == ("GPU-0", "GPU-1")


def test_fresh_engines_of_a_freed_cluster_take_what_is_free(monkeypatch):
    pool, other = cluster(monkeypatch), cluster(monkeypatch)
    pool.hold(2, {0: 100, 1: 101})
    pool.told({0: 100, 1: 101})
    pool.free()
    other.hold(2, {})
    assert pool.hold(2, {0: 200, 1: 201})[0].gpus == ("GPU-2", "GPU-3")


def test_the_next_owner_of_a_kept_cluster_holds_the_same(monkeypatch):
    pool, heir = cluster(monkeypatch), cluster(monkeypatch)
    given, _ = pool.hold(2, {0: 1, 1: 2})
    files = {gpu: str(path) for gpu, path in pool.reservations.files.items()}
    reservations.hold(tuple(files.values()))  # as its engines do
    pool.reservations.leave()  # its kernel ends
    assert set(reservations.holders()) == {"GPU-0", "GPU-1"}
    heir.restore(pool.settled, files, {0: 1, 1: 2})
    reservations.hold(())
    assert set(reservations.holders()) == {"GPU-0", "GPU-1"}
    assert heir.hold(2, {0: 1, 1: 2})[0] == given


def test_the_table_says_why_workers_compute_on_the_cpu_and_what_is_left_out(monkeypatch):
    lost = Gpu("H1", errors={"nvmlDeviceGetName": "GpuIsLost"})
    FakeNvml([Gpu("H0"), lost]).install(monkeypatch)
    pool = pool_of("auto")
    unused, too_few, held = pool.words(2)
    assert "GPU 1" in unused
    assert "GPU is lost" in unused
    assert too_few == pool.lease(2).warning != ""
    assert held.endswith("GPU 0: free.")
    pool.hold(1, {})
    assert pool.words(1)[-1].endswith("GPU 0: this cluster.")
    assert pool_of("cpu").words(2) == []
    FakeNvml().install(monkeypatch)
    assert pool_of("auto").words(2) == []


def test_the_first_gpu_run_says_once_that_nothing_is_proved(monkeypatch):
    said = [cluster(monkeypatch).hold(1, {})[1] for _ in range(2)]
    assert said == [[leases.NOT_PROVED], []]
    monkeypatch.setattr(leases, "_said", set())
    monkeypatch.setattr(leases, "PROVED_ON", ("H100",))
    assert cluster(monkeypatch).hold(1, {})[1] == []


HOLDER = """
import json, sys, time
from workbench.devices.reservations import Reservations
print(json.dumps(sorted(Reservations("other.ipynb").take(sys.argv[1:]))), flush=True)
time.sleep(60)
"""


def test_what_a_process_held_is_free_when_it_is_killed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(reservations.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, "GPU-a"], env=environment, stdout=subprocess.PIPE, text=True
    ) as other:
        assert json.loads(other.stdout.readline()) == []
        who = reservations.holders()["GPU-a"]
        assert (who.pid, who.notebook) == (other.pid, "other.ipynb")
        mine = reservations.Reservations()
        assert mine.take(["GPU-a", "GPU-b"]) == {"GPU-a": who}
        assert mine.files == {}
        other.kill()
        other.wait()
    assert mine.take(["GPU-a"]) == {}
    assert list(reservations.holders()) == ["GPU-a"]
    mine.drop()
    assert [path.name for path in (tmp_path / "gpus").iterdir()] == []


@pytest.mark.parametrize("what", ["file", "link", "not everybody's"])
def test_a_folder_that_is_not_everybodys_is_not_used_and_said(monkeypatch, tmp_path, what):
    path, elsewhere = tmp_path / "gpus", tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    if what == "file":
        path.write_text("")
    elif what == "link":
        path.symlink_to(elsewhere)
    else:
        path.mkdir(0o755)
    assert reservations.Reservations().take(["GPU-a"]) == {}
    assert list(elsewhere.iterdir()) == []
    assert str(path) in reservations.trouble()
    assert any("1777" in text for text in cluster(monkeypatch).hold(1, {})[1])
    monkeypatch.setenv(reservations.VARIABLE, "off")
    assert reservations.trouble() == ""


def test_what_others_put_into_the_folder_is_not_believed(tmp_path):
    mine = reservations.Reservations("a\x1b[31m\n" + "b" * 500)
    mine.take(["GPU-a"])
    folder = tmp_path / "gpus"
    os.mkfifo(folder / "GPU-b+x.json")
    (folder / "GPU-c+x.json").symlink_to(mine.files["GPU-a"])
    (folder / "GPU-d+x.json").write_text("{}")
    (folder / "GPU-e+x.json").mkdir()
    found = reservations.holders()
    assert list(found) == ["GPU-a"]
    assert len(found["GPU-a"].notebook) == 80
    assert found["GPU-a"].notebook.isprintable()
    mine.drop()


def test_a_full_disk_costs_the_reservation_and_not_the_run(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    pool = cluster(monkeypatch)
    monkeypatch.setattr(reservations.Reservations, "_write", full)
    assert devices_of(pool.hold(2, {})[0]) == ["cuda:0", "cuda:1"]
