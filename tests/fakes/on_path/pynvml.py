"""The fake driver under pynvml's name, for processes that a test starts (`fakes/nvml.py`)."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "fake_nvml", Path(__file__).resolve().parents[1] / "nvml.py"
)
_module = importlib.util.module_from_spec(_spec)
sys.modules["fake_nvml"] = _module
_spec.loader.exec_module(_module)
sys.modules[__name__] = _module.FakeNvml.from_environment()
