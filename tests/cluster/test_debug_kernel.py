"""Breakpoints in a real Jupyter kernel, with a front end that answers, or cannot."""

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")
manager = pytest.importorskip("jupyter_client.manager")


class FrontEnd:
    """Runs cells as JupyterLab does: it shows a field for each question of the kernel's."""

    def __init__(self, folder):
        self.kernel, self.client = manager.start_new_kernel(kernel_name="python3", cwd=str(folder))

    def close(self):
        self.client.stop_channels()
        self.kernel.shutdown_kernel()

    def run(self, source, *answers):
        """Return what was shown and which questions were asked."""
        shown, asked, lines = [], [], iter(answers)

        def ask(message):
            asked.append(message["content"]["prompt"])
            self.client.input(next(lines))

        def show(message):
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        reply = self.client.execute_interactive(
            source, allow_stdin=bool(answers), stdin_hook=ask, output_hook=show, timeout=90
        )
        return reply["content"]["status"], "".join(map(str, shown)), asked


@pytest.fixture
def front_end(tmp_path):
    one = FrontEnd(tmp_path)
    try:
        assert one.run("%load_ext workbench\n%cluster start 2")[0] == "ok"
        yield one
        assert one.run("%cluster stop")[0] == "ok"
    finally:
        one.close()


def test_a_front_end_answers_breakpoints_and_looks_at_failures(front_end):
    cell = "%%distributed\nx = rank\nbreakpoint()\nprint('x is', x)"
    status, shown, asked = front_end.run(cell, "p x + 40", "all x = x + 7", "all c")
    assert (status, asked) == ("ok", ["rank 0> "] * 3)
    assert "40\n" in shown
    assert "[rank 0] x is 7" in shown
    assert "[rank 1] x is 8" in shown

    status, shown, asked = front_end.run("%%distributed\nbreakpoint()\nprint('on')")
    assert (status, asked) == ("ok", [])
    assert "front end" in shown

    assert front_end.run("%%distributed\n1 / rank")[0] == "error"
    status, shown, asked = front_end.run("%cluster debug", "p rank - 5", "q")
    assert (status, asked) == ("ok", ["rank 0 post-mortem> "] * 2)
    assert "ZeroDivisionError" in shown
    assert "-5\n" in shown
    status, shown, asked = front_end.run("%cluster debug")
    assert (status, asked) == ("ok", [])
    assert "> 0  cell line 2: 1 / rank" in shown
