import pytest

from workbench.errors import PlanError
from workbench.line import (
    cell_parser,
    cluster_parser,
    parse_cell_line,
    parse_cluster_line,
    parse_ranks,
    strip_comment,
)


def test_an_empty_line_asks_for_every_worker_and_no_strategy():
    line = parse_cell_line("")
    assert line.strategies == ()
    assert line.workers is line.ranks is None
    assert line.overrides == {}


def test_a_full_line_is_read():
    line = parse_cell_line(
        "ddp,one_device -n 4 -o bucket_mb=10 --epochs 2 --batch-size 64 --seed 0 --name 'a run' "
        "--inject slow=1:50ms --inject jitter=5ms --background --local --plot svg  # a comment"
    )
    assert line.strategies == ("mirrored", "one_device")
    assert line.workers == 4
    assert line.options == {"bucket_mb": "10"}
    assert line.overrides == {"epochs": 2, "batch_size": 64, "seed": 0}
    assert line.name == "a run"
    assert [fault.text for fault in line.faults] == ["slow=1:50ms", "jitter=5ms"]
    assert line.background
    assert line.local
    assert line.plot == "svg"


@pytest.mark.parametrize("text", ["0,2", "[0,2]", " 0 , 2 ", "0,2,0"])
def test_ranks_have_several_spellings(text):
    assert parse_ranks(text) == (0, 2)


def test_ranks_may_be_ranges():
    assert parse_ranks("0-2,5") == (0, 1, 2, 5)
    assert parse_cell_line("--ranks 1-3").ranks == (1, 2, 3)


@pytest.mark.parametrize("text", ["", "a", "0--2", "-1", "1.5", "2-0"])
def test_ranks_that_are_none_are_refused(text):
    with pytest.raises(PlanError):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("start 4  # four", "start 4"),
        ("# all of it", ""),
        ("--name a#1", "--name a#1"),
        ("--name 'a # b' # c", "--name 'a # b'"),
        ("plain  ", "plain"),
    ],
)
def test_comments_go_and_number_signs_in_words_stay(line, left):
    assert strip_comment(line) == left


def test_cluster_lines_are_read():
    line = parse_cluster_line("start 4 --devices 0,1 --launcher slurm")
    assert (line.action, line.count, line.devices, line.launcher) == ("start", 4, "0,1", "slurm")
    assert parse_cluster_line("").action == "status"
    assert parse_cluster_line("restart 0 2-3").ranks == (0, 2, 3)
    assert parse_cluster_line("logs 1  # why?").ranks == (1,)


def test_checkpoints_and_failures_are_read():
    line = parse_cell_line("mirrored --checkpoint d --checkpoint-every 3 --on-failure continue")
    assert (line.checkpoint, line.checkpoint_every, line.on_failure) == ("d", 3, "continue")
    assert line.overrides == {}
    with pytest.raises(PlanError, match="--checkpoint-every must count"):
        parse_cell_line("mirrored --checkpoint d --checkpoint-every 0")


def test_help_is_made_from_the_catalog():
    text = cell_parser().format_help()
    assert "mirrored" in text
    assert "bucket_mb=25.0" in text
    assert "restart" in cluster_parser().format_help()


def test_a_parser_never_ends_the_process():
    with pytest.raises(PlanError, match="shows the help"):
        parse_cell_line("mirrored --nonsense")
    with pytest.raises(PlanError, match="expected one argument"):
        parse_cell_line("mirrored --name")
