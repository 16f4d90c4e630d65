"""The file with what was graded is whole at any time, from the first notebook on."""

from __future__ import annotations

import json
import os
import threading

import pytest

from workbench.labs.grading.results import Graded, Outcome, Saved, to_json


def graded(file, state="right"):
    return Graded(file, 1, [Outcome("1.1", state=state)])


def test_after_each_notebook_all_are_in_the_file_in_their_order(tmp_path):
    file = tmp_path / "out.json"
    saved = Saved(file, ["a", "b", "a"], {"cell_s": 5})
    saved.add(graded("a"))
    saved.add(graded("b"))
    content = json.loads(file.read_text())
    assert [one["file"] for one in content["notebooks"]] == ["a", "b", "a"]
    assert [one["graded"] for one in content["notebooks"]] == [True, True, False]
    assert content["notebooks"][2]["problems"][0].endswith("not reached.")
    assert (content["status"], content["ungraded"], content["limits"]) == (2, 1, {"cell_s": 5})
    saved.add(graded("a", "wrong"))
    states = [one["exercises"][0]["state"] for one in json.loads(file.read_text())["notebooks"]]
    assert states == ["right", "right", "wrong"]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    saved = Saved(file, ["a", "b"], {})
    saved.add(graded("a"))
    before = file.read_text()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(file), "replace", fail)
    with pytest.raises(OSError, match="No space"):
        saved.add(graded("b"))
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out.json")
    Saved(tmp_path / "link", ["a"], {}).add(graded("a"))
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "out.json").read_text())["status"] == 0


def test_a_pipe_is_written_once_at_the_end(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    saved = Saved(pipe, ["a"], {})
    saved.add(graded("a"))  # with no reader, a write would wait here for ever
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    saved.finish(content := to_json([graded("a")], {}))
    reader.join(20)
    assert read == [content]
