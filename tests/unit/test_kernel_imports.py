"""The notebook's side loads no framework, whatever of it is imported."""

import json
import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "tensorflow", "keras")


def modules_after(code):
    """Return which frameworks a fresh interpreter has loaded after running `code`."""
    loaded = f"[m for m in {FRAMEWORKS} if m in sys.modules]"
    script = f"{code}\nimport json, sys\nprint(json.dumps({loaded}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


EVERYTHING = """
import importlib, pkgutil, workbench
for package in ("session", "views", "history", "cluster"):
    module = importlib.import_module(f"workbench.{package}")
    for found in pkgutil.iter_modules(module.__path__):
        importlib.import_module(f"workbench.{package}.{found.name}")
import workbench.magics, workbench.cli, workbench.labs
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


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import workbench, sys; assert not {'ipyparallel', 'matplotlib', 'zmq'} & set(sys.modules)"
    )
    assert modules_after(code) == []


def test_an_unknown_name_is_an_attribute_error():
    import workbench

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = workbench.nothing
