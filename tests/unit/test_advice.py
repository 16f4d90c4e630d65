"""The next step for errors of frameworks that name none."""

from __future__ import annotations

import pytest

from workbench.engine.advice import advice


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (
            "ValueError: Expected more than 1 value per channel when training, got input size "
            "torch.Size([1, 4])",
            "drop_last=True",
        ),
        ("AttributeError: 'Sequential' object has no attribute 'module'", "write model in place"),
        ("AttributeError: 'Net' object has no attribute 'modules_'", None),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[127.0.0.1]:1234",
            "its loop was shorter",
        ),
        ("ValueError: something else", None),
    ],
)
def test_what_to_do_is_said_for_known_errors_alone(error: str, step: str | None) -> None:
    found = advice(error)
    assert (found is None) if step is None else (step in str(found))
