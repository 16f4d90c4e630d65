"""What goes wrong in a lab session: each mistake is named, and the lab can be continued."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from notebook_shell import Notebook, soon

from workbench.notebook.session import session

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cluster,
    pytest.mark.leaks("a lab goes on from one test to the next, on the cluster that it began"),
]


@pytest.fixture(scope="module")
def book():
    book = Notebook()
    book.ok("import workbench as wb\nfrom workbench import labs")
    try:
        yield book
    finally:
        session.stop()
        book.ok("from workbench.labs import limit\nlimit.install(get_ipython(), None)")


@pytest.fixture
def begun(book):
    """The notebook with two engines; one failed test, repeated, may have lost them."""
    if session.cluster is None:
        book.ok("labs.begin(1, engines=2)")
    return book


def check(book, number):
    """Run a check's cell; it must not fail."""
    return book.ok(f'found = labs.check("{number}")\nfound').text


def test_a_check_before_the_lab_has_begun_says_what_to_run(book):
    assert session.cluster is None
    text = check(book, "1.1")
    assert "No cluster" in text
    assert "hint: " in text
    assert not book["found"].passed


def test_beginning_starts_the_engines_and_beginning_again_clears_them(book):
    first = book.ok("labs.begin(1, engines=2)").text
    assert "2 engines" in first
    book.ok("%%distributed\nsquare = rank**2")
    assert "right (" in check(book, "1.1")
    engines = session.cluster.ids
    again = book.ok("labs.begin(1, engines=2)").text
    assert "variables of" in again
    assert session.cluster.ids == engines
    assert "has no `square`" in check(book, "1.1")
    assert "0 of 5 right" in book.ok("labs.progress(1)").text


def test_the_cluster_of_another_notebook_is_named(begun, tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", "import workbench as wb\nwith wb.Cluster(1): print(1); input()"],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout.readline().strip() == "1"
        text = begun.ok("labs.begin(1, engines=2)").text
        assert tmp_path.name in text
    finally:
        other.communicate("\n", timeout=60)


def test_another_number_of_engines_is_made_to_fit(begun):
    begun.ok("labs.begin(1, engines=3)")
    assert len(session.cluster.worker_ids) == 3
    text = begun.ok("labs.begin(1, engines=2)").text
    assert "of 3 " in text
    assert len(session.cluster.worker_ids) == 2


def test_cells_out_of_order_name_the_cell_that_is_missing(begun):
    text = check(begun, "1.4")
    assert "'small-alone'" in text
    assert "exercise 1.4" in text


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%distributed\n# YOUR CODE 1.1\nsquare = None", "still empty"),
        ("%%distributed\n# YOUR CODE 1.1\nsquare = [rank] * 3", "the value of rank 0 is"),
        ("%%rank 0\n# YOUR CODE 1.1\nsquare = 0\nimport builtins", "the value of rank 1 is"),
        ("%%distributed\n# YOUR CODE 1.1\nsquare = object()", "object"),
    ],
)
def test_an_answer_of_the_wrong_kind_is_shown(begun, cell, words):
    begun.ok("%%distributed\nsquare = -1")
    begun.ok(cell)
    assert words in check(begun, "1.1")


def test_a_syntax_error_is_the_cells_own_and_the_next_answer_counts(begun):
    broken = begun.run("# YOUR CODE 1.5\ndef crossing_s(n, c_s:\n    return 1")
    assert isinstance(broken.error, SyntaxError)
    assert "SyntaxError" in check(begun, "1.5")
    begun.ok("def crossing_s(n, c_s):\n    return c_s * n / (n - 1)")
    assert "right (" in check(begun, "1.5")


@pytest.mark.parametrize("magic", ["", "%%distributed\n"])
def test_a_loop_that_never_ends_is_stopped_and_named(begun, magic):
    begun.ok("labs.begin(1, engines=2, limit_s=1)")
    cell = begun.run(f"{magic}# YOUR CODE 1.1\nwhile True:\n    pass")
    assert cell.error is not None
    assert "exercise 1.1 took" in cell.text
    begun.ok("%%distributed\nsquare = rank**2")
    assert "right (" in check(begun, "1.1")


def test_engines_that_hang_in_a_check_are_interrupted(begun):
    from workbench.labs.answers import Check, Stuck

    looking = Check("2.1", {})
    with pytest.raises(Stuck):
        looking.ask("while True:\n    pass", limit_s=1)
    assert "within 1 s" in looking.findings[0].words
    assert looking.ask("_labs_answer = rank * 10") == [0, 10]


def test_a_check_that_is_stopped_leaves_the_engines_free(begun, tmp_path):
    from workbench.labs.answers import Check

    def stop():
        assert soon(lambda: len(list(tmp_path.iterdir())) == 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    looking = Check("2.1", {})
    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(KeyboardInterrupt):
        looking.ask(f"open({str(tmp_path)!r} + f'/{{rank}}', 'w')\nwhile True:\n    pass")
    stopping.join()
    assert looking.ask("_labs_answer = rank * 10") == [0, 10]


def test_engines_that_fail_in_a_check_are_quoted(begun):
    from workbench.labs.answers import Check, Stuck

    looking = Check("2.1", {})
    with pytest.raises(Stuck):
        looking.ask("undefined_name")
    assert "undefined_name" in looking.findings[0].words


def test_tensors_come_home_as_arrays(begun):
    from workbench.labs.answers import Check

    begun.ok("%%distributed\nimport torch\nsent = [torch.full((2,), float(rank)), {'a': rank}]")
    found = Check("2.1", {}).engines("sent")
    assert [value[0].tolist() for value in found] == [[0, 0], [1, 1]]
    assert found[1][1] == {"a": 1}


def test_names_are_shown_where_they_live(begun):
    begun.ok("at_home = 'h'")
    begun.ok("%%distributed\nover_there = rank")
    text = begun.ok("labs.namespaces()").text
    here, there = text.split("engine 0:")
    assert "at_home" in here
    assert "at_home" not in there
    assert "over_there = 1" in there.split("engine 1:")[1]


def test_a_run_can_be_taken_home(begun, tmp_path):
    begun.ok(
        "%%distributed one_device --steps 5 --name homeward --plot off\nimport torch\n"
        "wb.fit(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), "
        "wb.data.digits('train'), loss=torch.nn.CrossEntropyLoss(), "
        "optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=64)"
    )
    begun.ok(f"kept = labs.take_home('homeward', to={str(tmp_path / 'lab.zip')!r})\nkept")
    import zipfile

    with zipfile.ZipFile(tmp_path / "lab.zip") as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "home")
    assert {"README.txt", "homeward/history.csv", "homeward/run.png"} <= set(names)
    rows = (tmp_path / "home" / "homeward" / "history.csv").read_text().splitlines()
    assert len(rows) == 1 + 5
    begun.ok(f"again = wb.load({str(tmp_path / 'home' / 'homeward')!r})")
    assert len(begun["again"].history) == 5
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".zip"] == ["lab.zip"]
