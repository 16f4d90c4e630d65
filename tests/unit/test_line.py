import pytest

from workbench.errors import PlanError
from workbench.shared.run_request import cell_parser, parse_cell_line


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


def test_ranks_are_read():
    assert parse_cell_line("--ranks 1-3").ranks == (1, 2, 3)


def test_checkpoints_and_failures_are_read():
    line = parse_cell_line("mirrored --checkpoint d --checkpoint-every 3 --on-failure continue")
    assert (line.checkpoint, line.checkpoint_every, line.on_failure) == ("d", 3, "continue")
    assert line.overrides == {}
    with pytest.raises(PlanError, match=r"--checkpoint-every.*WB-PLAN-158"):
        parse_cell_line("mirrored --checkpoint d --checkpoint-every 0")


def test_help_is_made_from_the_catalog():
    text = cell_parser().format_help()
    assert "mirrored" in text
    assert "bucket_mb=25.0" in text


def test_a_parser_never_ends_the_process():
    with pytest.raises(PlanError, match="WB-PLAN-155"):
        parse_cell_line("mirrored --nonsense")
    with pytest.raises(PlanError, match=r"expected one argument.*WB-PLAN-156"):
        parse_cell_line("mirrored --name")


def test_every_frame_of_an_error_is_asked_for_by_name():
    assert parse_cell_line("").traceback == "short"
    assert parse_cell_line("mirrored --traceback full").traceback == "full"
    with pytest.raises(PlanError, match=r"full.*WB-PLAN-156"):
        parse_cell_line("--traceback all")
