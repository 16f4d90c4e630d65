"""The next step for errors of frameworks that name none."""

from __future__ import annotations

from types import SimpleNamespace

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
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space "
            "left on device (28)",
            "num_workers=0",
        ),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Unexpected bus error "
            "encountered in worker. This might be caused by insufficient shared memory (shm).",
            "num_workers=0",
        ),
        ("ValueError: something else", None),
    ],
)
def test_what_to_do_is_said_for_known_errors_alone(error: str, step: str | None) -> None:
    found = advice(error)
    assert (found is None) if step is None else (step in str(found))


def test_no_room_is_said_of_the_place_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "OSError: [Errno 28] No space left on device"
    rooms = {"/dev/shm": 0}
    monkeypatch.setattr(
        "workbench.engine.advice.shutil.disk_usage",
        lambda place: SimpleNamespace(free=rooms.get(str(place), 10**9)),
    )
    assert str(advice(error)).startswith("/dev/shm (the shared memory")
    rooms["/dev/shm"] = 10**9
    assert advice(error) == "make room there, or write to another folder"
