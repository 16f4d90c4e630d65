import pytest

from workbench.errors import PlanError
from workbench.shared.magic_args import parse_ranks, strip_comment


@pytest.mark.parametrize("text", ["0,2", "[0,2]", " 0 , 2 ", "0,2,0"])
def test_ranks_have_several_spellings(text):
    assert parse_ranks(text) == (0, 2)


def test_ranks_may_be_ranges():
    assert parse_ranks("0-2,5") == (0, 1, 2, 5)


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
