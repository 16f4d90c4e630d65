"""Orders to a run in another process: only its user's, each once, in their order."""

from __future__ import annotations

import hmac
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from fuzz_profile import tries
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import PlanError, RunError
from workbench.jobs import control
from workbench.jobs.control import Inbox, Order

FAULTS = ("slow=1:50ms", "jitter=20ms")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def inbox(run_dir: Path) -> Inbox:
    return Inbox(run_dir, control.make_key(run_dir))


def files(run_dir: Path) -> list[str]:
    return [name for name in os.listdir(run_dir / control.INBOX) if not name.startswith(".")]


def lay(run_dir: Path, content: bytes, name: str = "1-ab.json") -> Path:
    path = run_dir / control.INBOX / name
    path.write_bytes(content)
    return path


def test_key_and_inbox_are_for_this_user_alone_whatever_the_umask(run_dir: Path) -> None:
    before = os.umask(0)
    try:
        key = control.make_key(run_dir)
        control.put(run_dir, b"{}")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (run_dir / control.KEY, run_dir / control.INBOX)
    }
    assert modes == {control.KEY: 0o600, control.INBOX: 0o700}
    [name] = files(run_dir)
    assert stat.S_IMODE((run_dir / control.INBOX / name).stat().st_mode) == 0o600
    assert control.read_key(run_dir) == key
    assert len(key) == control.KEY_BYTES


def test_a_run_that_begins_again_in_its_folder_has_a_new_key(run_dir: Path) -> None:
    first = control.make_key(run_dir)
    assert control.make_key(run_dir) != first


@pytest.mark.parametrize(
    "order",
    [
        Order("stop"),
        Order("pause"),
        Order("resume"),
        Order("step", steps=12),
        Order("inject", faults=FAULTS),
        Order("interrupt"),
    ],
    ids=lambda order: order.do,
)
def test_an_order_arrives_as_it_was_given(run_dir: Path, inbox: Inbox, order: Order) -> None:
    control.give(run_dir, order)
    assert inbox.take() == [order]
    assert files(run_dir) == []
    assert inbox.take() == []
    assert inbox.refused == 0


def test_orders_are_taken_by_their_numbers_and_not_by_when_they_were_put(
    run_dir: Path, inbox: Inbox
) -> None:
    key = control.read_key(run_dir)
    for number in (7, 5, 6):
        control.put(run_dir, control.packed(Order("step", number=number), key))
    assert [order.number for order in inbox.take()] == [5, 6, 7]


def test_an_order_that_was_taken_is_refused_the_second_time(run_dir: Path, inbox: Inbox) -> None:
    signed = control.packed(Order("stop"), control.read_key(run_dir))
    for expected, refused in ((1, 0), (0, 1)):
        control.put(run_dir, signed)
        assert len(inbox.take()) == expected
        assert inbox.refused == refused
    control.put(run_dir, signed)
    again = Inbox(run_dir, control.read_key(run_dir))  # another process of the same run
    assert again.take() == []
    assert again.refused == 1


def test_an_order_older_than_one_that_was_taken_is_refused(run_dir: Path, inbox: Inbox) -> None:
    key = control.read_key(run_dir)
    for number in (9, 8):
        control.put(run_dir, control.packed(Order("pause", number=number), key))
        inbox.take()
    assert inbox.refused == 1


def test_a_clock_that_is_behind_does_not_make_orders_old(run_dir: Path, inbox: Inbox) -> None:
    ahead = Order("pause", number=1 << 62)
    control.give(run_dir, ahead)
    assert inbox.take() == [ahead]
    control.give(run_dir, Order("resume"))
    [order] = inbox.take()
    assert (order.do, order.number) == ("resume", (1 << 62) + 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe\n\n",
        b'{"do":"stop","steps":1,"faults":[],"number":5}',
        b'{"do":"stop","steps":1,"faults":[],"number":5}\n',
        control.packed(Order("stop"), b"another run's key"),
        b"x" * (control.ORDER_BYTES + 1),
    ],
)
def test_what_this_run_s_key_did_not_sign_is_refused_and_deleted(
    run_dir: Path, inbox: Inbox, content: bytes
) -> None:
    lay(run_dir, content)
    assert inbox.take() == []
    assert inbox.refused == 1
    assert files(run_dir) == []


def test_a_changed_order_is_refused(run_dir: Path, inbox: Inbox) -> None:
    signed = control.packed(Order("pause"), control.read_key(run_dir))
    lay(run_dir, signed.replace(b"pause", b"stop"))
    assert inbox.take() == []
    assert inbox.refused == 1


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"7",
        b"{}",
        b"[" * 3000,
        b'{"do":"rm","steps":1,"faults":[],"number":5}',
        b'{"do":"stop","steps":1,"faults":[],"number":5,"more":1}',
        b'{"do":"stop","steps":1,"faults":null,"number":5}',
    ],
)
def test_what_is_signed_but_no_order_is_refused(run_dir: Path, inbox: Inbox, text: bytes) -> None:
    mac = hmac.digest(control.read_key(run_dir), text, "sha256").hex().encode()
    lay(run_dir, text + b"\n" + mac)
    assert inbox.take() == []
    assert inbox.refused == 1


def test_a_link_to_an_order_is_refused_and_what_it_leads_to_stays(
    run_dir: Path, inbox: Inbox
) -> None:
    real = run_dir / "elsewhere"
    real.write_bytes(control.packed(Order("stop"), control.read_key(run_dir)))
    (run_dir / control.INBOX / "1-ab.json").symlink_to(real)
    assert inbox.take() == []
    assert (inbox.refused, files(run_dir), real.exists()) == (1, [], True)


def test_a_pipe_in_the_inbox_is_not_waited_for(run_dir: Path, inbox: Inbox) -> None:
    os.mkfifo(run_dir / control.INBOX / "1-ab.json")
    assert inbox.take() == []
    assert inbox.refused == 1


def test_a_folder_in_the_inbox_is_refused_once(run_dir: Path, inbox: Inbox) -> None:
    (run_dir / control.INBOX / "1-ab.json").mkdir()
    assert [inbox.take(), inbox.take(), inbox.refused] == [[], [], 1]
    control.give(run_dir, Order("stop"))
    assert len(inbox.take()) == 1


def owned_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def fstat(handle: int) -> SimpleNamespace:
        about = os.stat(handle)
        return SimpleNamespace(
            st_uid=about.st_uid + 1, st_mode=about.st_mode, st_size=about.st_size
        )

    monkeypatch.setattr(control.os, "fstat", fstat)


def test_an_order_of_another_user_is_refused(
    run_dir: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.give(run_dir, Order("stop"))
    owned_by_another(monkeypatch)
    assert inbox.take() == []
    assert inbox.refused == 1


def test_an_inbox_that_is_a_link_is_not_looked_into(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", tmp_path / "other"
    for folder in (run_dir, other):
        folder.mkdir()
        key = control.make_key(folder)
    control.put(other, control.packed(Order("stop"), key))
    os.rmdir(run_dir / control.INBOX)
    (run_dir / control.INBOX).symlink_to(other / control.INBOX)
    assert Inbox(run_dir, key).take() == []
    assert len(files(other)) == 1


def test_a_flood_is_taken_a_hundred_at_a_time(run_dir: Path, inbox: Inbox) -> None:
    for number in range(250):
        lay(run_dir, b"no order", f"{number}-ab.json")
    refused = []
    for _ in range(4):
        inbox.take()
        refused.append(inbox.refused)
    assert refused == [100, 200, 250, 250]


def test_half_an_order_is_not_seen(run_dir: Path, inbox: Inbox) -> None:
    lay(run_dir, b"half", ".1-ab.json.0000")
    assert (inbox.take(), inbox.refused) == ([], 0)


def test_a_run_without_an_inbox_has_no_orders(tmp_path: Path) -> None:
    assert Inbox(tmp_path, b"key").take() == []


# -- the key ---------------------------------------------------------------------------------------


def refused_key(run_dir: Path) -> str:
    with pytest.raises(RunError) as caught:
        control.read_key(run_dir)
    assert caught.value.next_step
    return caught.value.code


def test_a_key_that_others_could_read_or_made_is_not_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused_key(run_dir) == "WB-RUN-108"
    control.make_key(run_dir)
    path = run_dir / control.KEY
    path.chmod(0o640)
    assert refused_key(run_dir) == "WB-RUN-109"
    path.chmod(0o600)
    with monkeypatch.context() as patch:
        owned_by_another(patch)
        assert refused_key(run_dir) == "WB-RUN-109"
    path.rename(run_dir / "elsewhere")
    path.symlink_to(run_dir / "elsewhere")
    assert refused_key(run_dir) == "WB-RUN-109"
    path.unlink()
    os.mkfifo(path, 0o600)
    assert refused_key(run_dir) == "WB-RUN-109"


@pytest.mark.parametrize("content", [b"", b"abcd", b"x" * 64, b"\xff" * 64, b"0" * 66])
def test_a_damaged_key_is_told(run_dir: Path, content: bytes) -> None:
    control.make_key(run_dir)
    (run_dir / control.KEY).write_bytes(content)
    assert refused_key(run_dir) == "WB-RUN-110"


def test_an_order_that_cannot_be_written_is_told_and_nothing_is_left(
    run_dir: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError) as caught:
        control.give(run_dir, Order("stop"))
    assert caught.value.code == "WB-RUN-111"
    assert os.listdir(run_dir / control.INBOX) == []


# -- what an order is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "about",
    [
        {"do": "delete"},
        {"do": ["stop"]},
        {"do": "step", "steps": 0},
        {"do": "step", "steps": True},
        {"do": "step", "steps": control.MOST_STEPS + 1},
        {"do": "stop", "number": -1},
        {"do": "stop", "number": 1 << 63},
        {"do": "stop", "faults": FAULTS},
        {"do": "inject", "faults": list(FAULTS)},
        {"do": "inject", "faults": (5,)},
        {"do": "inject", "faults": ("jitter=1ms",) * (control.MOST_FAULTS + 1)},
        {"do": "inject", "faults": (f"slow=1:{'9' * 400}ms",)},
        {"do": "inject", "faults": (f"jitter={'0' * 4000}1ms",)},
    ],
)
def test_what_no_run_can_do_is_no_order(about: dict) -> None:
    with pytest.raises(PlanError) as caught:
        Order(**about)
    assert caught.value.code == "WB-PLAN-237"


def test_a_fault_that_is_not_understood_says_its_own_error() -> None:
    with pytest.raises(PlanError) as caught:
        Order("inject", faults=("slow=much",))
    assert caught.value.code == "WB-PLAN-040"


def test_the_largest_order_fits_into_a_file(run_dir: Path, inbox: Inbox) -> None:
    text = "slow=1:" + "0" * (control.ORDER_BYTES // 2 - 10) + "5x"
    control.give(run_dir, Order("inject", faults=(text,)))
    assert len(inbox.take()) == 1


def test_a_line_of_json_is_read_back(run_dir: Path) -> None:
    order = Order("inject", faults=FAULTS)
    assert control.read_order(control.order_text(order)) == order


@pytest.mark.parametrize(
    "text", [b"", b"stop", b"[]", b"{}", b"[" * 4000, b" " * 5000, b'{"do":"stop","faults":5}']
)
def test_text_that_is_no_order_is_told(text: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        control.read_order(text)
    assert caught.value.code == "WB-PLAN-238"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
TEXTS = st.binary(max_size=300) | st.fixed_dictionaries(
    {},
    optional={
        "do": st.sampled_from(["stop", "step", "inject"]) | JSON,
        "steps": st.integers() | JSON,
        "faults": st.lists(st.sampled_from([*FAULTS, "kill=1@2", "slow=x"]) | JSON) | JSON,
        "number": st.integers() | JSON,
    },
).map(lambda about: json.dumps(about).encode())


@tries(60)
@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=5))
def test_whatever_lies_in_the_inbox_each_file_is_an_order_or_refused(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[bytes, bool]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    key = control.make_key(run_dir)
    for number, (text, signed) in enumerate(contents):
        mac = hmac.digest(key, text, "sha256").hex().encode()
        lay(run_dir, text + b"\n" + mac if signed else text, f"{number}-ab.json")
    inbox = Inbox(run_dir, key)
    taken = inbox.take()
    assert len(taken) + inbox.refused == len(contents)
    assert files(run_dir) == []
