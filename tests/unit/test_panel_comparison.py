"""The panel's comparison without a browser: which runs it takes, and what it leaves on the disk."""

import numpy as np
import pytest

from workbench.panels.comparison import ComparisonPart
from workbench.protocol import RECORD


class Resting:
    """A history that is on disk only; whoever reads it wakes it."""

    rests = True

    @property
    def totals(self):
        raise AssertionError("it was read from disk")


class OldRun:
    def __init__(self, folder, rows):
        self.folder, self.engines, self.history = folder, (0,), Resting()
        np.zeros(rows, RECORD).tofile(folder / "records-rank0.bin")


def test_a_run_that_rests_is_not_read_to_see_whether_it_trained(tmp_path):
    part = ComparisonPart(panel=None)
    assert part._has_steps(OldRun(tmp_path, rows=1))


def test_a_run_that_rests_without_a_row_is_looked_at(tmp_path):
    part = ComparisonPart(panel=None)
    with pytest.raises(AssertionError, match="read from disk"):
        part._has_steps(OldRun(tmp_path, rows=0))
