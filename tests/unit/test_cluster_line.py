from types import SimpleNamespace

import pytest

from workbench import magics
from workbench.errors import ClusterError, PlanError
from workbench.magics import _complete
from workbench.shared.magic_args import cluster_parser, parse_cluster_line


def test_cluster_lines_are_read():
    line = parse_cluster_line("start 4 --devices 0,1 --launcher slurm")
    assert (line.action, line.count, line.devices) == ("start", 4, "0,1")
    assert line.launch == {"launcher": "slurm"}
    assert parse_cluster_line("").action == "status"
    assert parse_cluster_line("restart 0 2-3").ranks == (0, 2, 3)
    assert parse_cluster_line("logs 1  # why?").ranks == (1,)


def test_what_was_not_typed_is_not_said():
    line = parse_cluster_line("start 6")
    assert (line.launch, line.devices) == ({}, None)


def test_where_engines_start_is_read_whole():
    line = parse_cluster_line(
        "start 8 --launcher slurm --nodes 2 --gpus-per-node 4 --time 1:00:00 --partition gpu "
        "--account ml --setup 'module load cuda' --setup '#SBATCH --exclusive' "
        "--launcher-option qos=high --launcher-option 'python=apptainer exec a.sif python' "
        "--listen eth0 --ports 20000-20100 --start-timeout 10m  # all of it"
    )
    assert line.count == 8
    assert line.launch == {
        "launcher": "slurm",
        "nodes": 2,
        "gpus_per_node": 4,
        "time": "1:00:00",
        "partition": "gpu",
        "account": "ml",
        "setup": ("module load cuda", "#SBATCH --exclusive"),
        "launcher_options": ("qos=high", "python=apptainer exec a.sif python"),
        "listen": "eth0",
        "ports": "20000-20100",
        "start_timeout": "10m",
    }
    assert parse_cluster_line("start 6 --launcher ssh --on a:4,b@c:2").launch == {
        "launcher": "ssh",
        "on": "a:4,b@c:2",
    }
    assert parse_cluster_line("start --hosts 10.0.0.1").launch == {"listen": "10.0.0.1"}


def test_a_number_that_counts_nothing_is_refused_with_its_flag():
    with pytest.raises(PlanError, match="--nodes"):
        parse_cluster_line("start 8 --launcher slurm --nodes two")
    with pytest.raises(PlanError, match="--nodes"):
        parse_cluster_line("start 8 --launcher slurm --nodes 0")


@pytest.mark.parametrize("line", ["%cluster start 2 --launcher ", "%cluster start --launcher sl"])
def test_launchers_are_completed_by_name(line):
    assert {"local", "ssh", "slurm", "mpi"} <= set(_complete(None, SimpleNamespace(line=line)))
    assert "--launcher" in _complete(None, SimpleNamespace(line="%cluster start 2 --la"))


def test_help_names_the_actions():
    assert "restart" in cluster_parser().format_help()


def test_a_start_that_is_interrupted_ends_in_a_line_and_no_traceback(monkeypatch):
    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(magics, "session", SimpleNamespace(start=interrupted, cluster=None))
    with pytest.raises(ClusterError, match="WB-CLUSTER-078") as caught:
        magics.WorkbenchMagics(None).cluster("start 2")
    assert caught.value.__suppress_context__
