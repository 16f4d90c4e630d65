"""What a framework's import depends on; shared by both sides, imports nothing of either."""

from __future__ import annotations

import os
from collections.abc import Mapping

NVIDIA_DRIVER = "/dev/nvidiactl"


def import_environment(framework: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a framework is to be imported with, besides what is given.

    TensorFlow reads these once, while it loads or at its first message. Which framework Keras
    computes with is what was asked for, whatever the user's settings say. Messages of the C++ side
    would stand below cells; without an NVIDIA driver its errors are about that.
    """
    if framework != "tensorflow":
        return {}
    level = "2" if os.path.exists(NVIDIA_DRIVER) else "3"
    return {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": given.get("TF_CPP_MIN_LOG_LEVEL", level),
    }
