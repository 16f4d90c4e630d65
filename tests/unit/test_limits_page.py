"""The file that `docs/shared-machines.md` shows is one that is understood."""

from __future__ import annotations

import re
from pathlib import Path

from workbench.devices import limits
from workbench.devices.limits import Limits

PAGE = Path(__file__).parents[2] / "docs" / "shared-machines.md"


def test_the_example_is_read_and_every_name_is_documented(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "limits.toml"
    path.write_text(example)
    assert limits.load({}, path) == Limits(16, (("0", "1"),), 7200.0, False)
    assert str(limits.SYSTEM_FILE) in example
    for name, variable in limits.VARIABLES.items():
        assert f"| `{variable}` | `{name}` |" in text
