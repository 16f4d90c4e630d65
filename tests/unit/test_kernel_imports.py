"""The notebook's side loads no framework, whatever of it is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

FRAMEWORKS = ("torch", "tensorflow", "keras")


def modules_after(code):
    """Return which frameworks a fresh interpreter has loaded after running `code`."""
    loaded = f"[m for m in {FRAMEWORKS} if m in sys.modules]"
    script = f"{code}\nimport json, sys\nprint(json.dumps({loaded}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ENGINES = ("workbench.engine", "workbench.strategies")
"""What only engines import."""
THEIR_OWN = ("workbench.data.torch_sets",)
"""What engines alone load, beside what they share with the kernel."""


def kernel_side():
    """Return every module that a notebook's kernel or the command line may import."""
    found = ["workbench"]
    for path in sorted(Path(workbench.__file__).parent.rglob("*.py")):
        parts = path.relative_to(Path(workbench.__file__).parents[1]).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith(ENGINES) and name not in THEIR_OWN and "__main__" not in name:
            found.append(name)
    return sorted(set(found))


EVERYTHING = f"""
import importlib
for name in {kernel_side()}:
    importlib.import_module(name)
import workbench
for name in workbench.__all__:
    getattr(workbench, name)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import workbench as wb; dir(wb); wb.runs",
        "from IPython.core.interactiveshell import InteractiveShell as S\n"
        "import os; os.environ['WORKBENCH_PREWARM'] = 'off'\n"
        "S.instance().run_line_magic('load_ext', 'workbench')",
        EVERYTHING,
        "import workbench as wb\ntry:\n    wb.fit(1, 2)\nexcept wb.WorkbenchError: pass",
    ],
    ids=["package", "extension", "everything", "fit in the notebook"],
)
def test_no_framework_is_loaded(code):
    assert modules_after(code) == []


def test_the_kernels_side_is_all_there_is_but_the_engines():
    found = kernel_side()
    for name in (
        "panels.show", "execution.sinks.mlflow", "views.panel", "labs.grading.processes",
        "magics", "cli", "catalog.entries", "cookbook.builtin", "history.analysis.rows",
    ):  # fmt: skip
        assert f"workbench.{name}" in found
    assert not [name for name in found if name.startswith(ENGINES)]


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import workbench, sys; assert not {'ipyparallel', 'matplotlib', 'zmq'} & set(sys.modules)"
    )
    assert modules_after(code) == []


def test_an_unknown_name_is_an_attribute_error():
    import workbench

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = workbench.nothing
