"""Mistakes that are named before an engine is touched (see `mistakes.py`)."""

from __future__ import annotations

from mistakes import Mistake, fit

LINE = [
    Mistake(
        "A strategy's name is misspelt",
        fit("miror"),
        ("'miror'", "did you mean 'mirrored'?"),
        fit("mirrored"),
    ),
    Mistake(
        "An option's name is misspelt",
        fit("mirrored -o bucket=3"),
        ("option of mirrored", "did you mean 'bucket_mb'?"),
        fit("mirrored -o bucket_mb=3"),
    ),
    Mistake(
        "An option is out of range",
        fit("local_sgd -o every=0"),
        ("at least 1", "-o every=1"),
        fit("local_sgd -o every=1"),
    ),
    Mistake(
        "An option belongs to another strategy",
        fit("mirrored -o max_staleness=2"),
        ("one of parameter_server", "%%distributed parameter_server -o max_staleness"),
        fit("parameter_server -o max_staleness=2"),
    ),
    Mistake(
        "Two options exclude each other",
        fit("parameter_server -o sync=true -o max_staleness=2"),
        ("exclude each other", "leave one of them out"),
        fit("parameter_server -o sync=true"),
    ),
    Mistake(
        "The line asks for a batch smaller than the workers",
        fit("mirrored --batch-size 1"),
        ("batch_size=1 over 2 workers", "-n 1"),
        fit("mirrored --batch-size 1 -n 1"),
    ),
    Mistake(
        "No epochs at all",
        fit("mirrored --epochs 0"),
        ("--epochs", "at least 1"),
        fit("mirrored --epochs 1", steps=None),
    ),
    Mistake(
        "A fault for a worker that is not there",
        fit("mirrored --inject slow=9:50ms"),
        ("slow=9:50ms", "ranks 0 to 1"),
        fit("mirrored --inject slow=1:5ms"),
    ),
    Mistake(
        "Epochs without a strategy",
        "%%distributed --epochs 3\nx = 1",
        ("names no strategy", "%%distributed mirrored"),
        fit("mirrored --epochs 3", steps=None),
    ),
    Mistake(
        "Ranks chosen for a strategy",
        fit("mirrored --ranks 0"),
        ("A strategy chooses its own workers", "-n"),
        fit("mirrored -n 1"),
    ),
    Mistake(
        "Microbatches that do not divide",
        fit("model_split -o schedule=interleaved -o microbatches=5"),
        ("do not divide into them", "microbatches=4"),
        fit("model_split -o schedule=interleaved -o stages_per_worker=1 -o microbatches=4"),
    ),
    Mistake(
        "Workers that do not fill whole pipelines",
        fit("hybrid -o stages=3"),
        ("do not fill whole pipelines", "-n 3"),
    ),
    Mistake(
        "A run to start from that does not exist",
        fit("mirrored --init-from nowhere"),
        ("'nowhere'",),
    ),
    Mistake(
        "A recipe that does not exist",
        "%distributed mirrored --recipe nowhere",
        ("'nowhere'",),
    ),
    Mistake("An empty cell", "%%distributed mirrored --plot off\n   ", ("The cell is empty",)),
    Mistake(
        "More engines than anybody has",
        fit("mirrored -n 100000"),
        ("100000", "1 to 256"),
    ),
    Mistake(
        "A GPU that this machine does not have",
        "%cluster start 2 --devices 97",
        ("other devices", "%cluster stop"),
    ),
    Mistake("An engine that does not exist", "%cluster restart 9", ("no such engine", "0, 1")),
    Mistake("A variable to push that does not exist", "%push no_such_name", ("no such name",)),
    Mistake(
        "wb.fit without a magic on top",
        "wb.fit(1, 2)",
        ("outside a training run", "%%distributed mirrored"),
    ),
    Mistake(
        "A framework that does not exist",
        fit("mirrored --framework jax"),
        ("'jax'", "tensorflow, torch"),
    ),
    Mistake(
        "A lambda as a recipe",
        "with wb.Cluster(1) as mine:\n    mine.run(lambda: 1, strategy='mirrored')",
        ("lambda",),
    ),
]
