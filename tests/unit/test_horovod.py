"""How `import horovod.torch` is found, and words of other systems on the line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import need

from workbench import catalog
from workbench.shared.run_request import parse_cell_line

need("torch")


@pytest.fixture
def finder() -> Iterator[object]:
    """Let the stand-in be found, as on an engine, and nothing be left of it."""
    from workbench.engine.torch.horovod import finder

    before = list(sys.meta_path)
    finder.install()
    yield finder
    finder.uninstall()
    assert sys.meta_path == before
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


def test_horovod_and_its_parts_are_found(finder: object) -> None:
    horovod = importlib.import_module("horovod")
    hvd = importlib.import_module("horovod.torch")
    assert horovod.torch is hvd
    assert "workbench" in horovod.__version__
    from horovod.torch.compression import Compression
    from horovod.torch.mpi_ops import Average, allreduce

    assert (Compression, Average, allreduce) == (hvd.Compression, hvd.Average, hvd.allreduce)
    assert not hvd.is_initialized()
    with pytest.raises(Exception, match="WB-FIT-183"):
        horovod.run(print, np=2)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.torch.nothing")


def test_installing_twice_is_installing_once(finder: object) -> None:
    before = list(sys.meta_path)
    finder.install()  # type: ignore[attr-defined]
    assert sys.meta_path == before


@pytest.mark.parametrize("part", ["tensorflow", "keras", "spark"])
def test_parts_that_are_not_here_say_what_to_do(finder: object, part: str) -> None:
    with pytest.raises(ImportError, match="WB-FIT-184") as caught:
        importlib.import_module(f"horovod.{part}")
    assert "%%distributed" in str(caught.value)
    assert f"horovod.{part}" not in sys.modules


def test_a_real_horovod_wins(
    finder: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'")
    (tmp_path / "horovod" / "torch" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("horovod").__version__ == "real"
    assert importlib.import_module("horovod.torch").real
    with pytest.raises(ModuleNotFoundError):  # what a real one lacks is lacking
        importlib.import_module("horovod.keras")


def test_other_modules_are_none_of_its_business(finder: object) -> None:
    assert importlib.util.find_spec("horovodlike") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nothing_of_that_name.horovod")


def test_a_kernel_does_not_find_it() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("horovod", "mirrored"), ("dp", "mirrored"), ("DistributedDataParallel", "mirrored"),
        ("fsdp2", "sharded"), ("zero", "sharded"), ("zero2", "sharded"), ("ZeRO3", "sharded"),
        ("FullyShardedDataParallel", "sharded"), ("kvstore", "parameter_server"),
        ("pserver", "parameter_server"), ("megatron", "tensor_parallel"),
        ("gpipe", "model_split"),
    ],
)  # fmt: skip
def test_words_of_other_systems_lead_to_a_strategy(word: str, name: str) -> None:
    assert parse_cell_line(f"{word} -n 2").strategies == (name,)
    assert catalog.lookup(word).name == name


@pytest.mark.parametrize("entry", catalog.strategies("tensorflow"), ids=lambda one: one.name)
def test_class_names_of_tensorflow_lead_to_a_strategy(entry: catalog.Strategy) -> None:
    kind = "".join(part.title() for part in entry.name.split("_")) + "Strategy"
    assert catalog.lookup(kind, "tensorflow") is entry
    assert catalog.canonical(kind) == entry.name


@pytest.mark.parametrize("framework", catalog.FRAMEWORKS)
def test_no_two_strategies_are_called_alike(framework: str) -> None:
    entries = catalog.strategies(framework)
    known = [catalog.plain(word) for one in entries for word in (one.name, *one.aliases)]
    assert len(known) == len(set(known))


def test_the_names_themselves_are_offered() -> None:
    assert "horovod" not in catalog.names()
