"""Mistakes that are reported before an engine is used (see `mistakes.py`)."""

from __future__ import annotations

from mistakes import Mistake, fit

LINE = [
    Mistake(
        "A strategy's name is misspelt",
        fit("miror"),
        "WB-PLAN-037",
        fit("mirrored"),
    ),
    Mistake(
        "An option's name is misspelt",
        fit("mirrored -o bucket=3"),
        "WB-PLAN-037",
        fit("mirrored -o bucket_mb=3"),
    ),
    Mistake(
        "An option is out of range",
        fit("local_sgd -o every=0"),
        "WB-PLAN-004",
        fit("local_sgd -o every=1"),
    ),
    Mistake(
        "An option belongs to another strategy",
        fit("mirrored -o max_staleness=2"),
        "WB-PLAN-005",
        fit("parameter_server -o max_staleness=2"),
    ),
    Mistake(
        "Two options exclude each other",
        fit("parameter_server -o sync=true -o max_staleness=2"),
        "WB-PLAN-007",
        fit("parameter_server -o sync=true"),
    ),
    Mistake(
        "An option means nothing without another one",
        fit("local_sgd -o outer_lr=1"),
        "WB-PLAN-318",
        fit("local_sgd -o outer=nesterov -o outer_lr=1"),
    ),
    Mistake(
        "A round has fewer steps than fragments",
        fit("local_sgd -o every=4 -o fragments=5"),
        "WB-PLAN-319",
        fit("local_sgd -o every=4 -o fragments=4"),
    ),
    Mistake(
        "The line asks for a batch smaller than the workers",
        fit("mirrored --batch-size 1"),
        "WB-PLAN-087",
        fit("mirrored --batch-size 1 -n 1"),
    ),
    Mistake(
        "No epochs at all",
        fit("mirrored --epochs 0"),
        "WB-PLAN-158",
        fit("mirrored --epochs 1", steps=None),
    ),
    Mistake(
        "A fault for a worker that is not there",
        fit("mirrored --inject slow=9:50ms"),
        "WB-PLAN-039",
        fit("mirrored --inject slow=1:5ms"),
    ),
    Mistake(
        "Epochs without a strategy",
        "%%distributed --epochs 3\nx = 1",
        "WB-PLAN-129",
        fit("mirrored --epochs 3", steps=None),
    ),
    Mistake(
        "Ranks chosen for a strategy",
        fit("mirrored --ranks 0"),
        "WB-PLAN-130",
        fit("mirrored -n 1"),
    ),
    Mistake(
        "Microbatches that do not divide",
        fit("model_split -o schedule=interleaved -o microbatches=5"),
        "WB-PLAN-081",
        fit("model_split -o schedule=interleaved -o stages_per_worker=1 -o microbatches=4"),
    ),
    Mistake(
        "Workers that do not fill whole pipelines",
        fit("hybrid -o stages=3"),
        "WB-PLAN-083",
    ),
    Mistake(
        "A run to start from that does not exist",
        fit("mirrored --init-from nowhere"),
        "WB-PLAN-037",
    ),
    Mistake(
        "A recipe that does not exist",
        "%distributed mirrored --recipe nowhere",
        "WB-PLAN-037",
    ),
    Mistake("An empty cell", "%%distributed mirrored --plot off\n   ", "WB-PLAN-085"),
    Mistake(
        "More engines than anybody has",
        fit("mirrored -n 100000"),
        "WB-PLAN-100",
    ),
    Mistake(
        "A GPU that this machine does not have",
        "%cluster start 2 --devices 97",
        "WB-PLAN-127",
    ),
    Mistake(
        "A launcher's name is misspelt",
        "%cluster start 2 --launcher slrum",
        "WB-PLAN-037",
        "%cluster start 2",
    ),
    Mistake(
        "A flag of another launcher",
        "%cluster start 2 --partition gpu",
        "WB-PLAN-165",
        "%cluster start 2",
    ),
    Mistake(
        "ssh without hosts",
        "wb.Cluster(2, launcher='ssh')",
        "WB-PLAN-166",
    ),
    Mistake(
        "A host that is named twice",
        "wb.Cluster(2, launcher='ssh', on='node1,me@node1')",
        "WB-PLAN-168",
    ),
    Mistake(
        "A time that Slurm does not know",
        "wb.Cluster(2, launcher='slurm', time='2h')",
        "WB-PLAN-170",
    ),
    Mistake(
        "Too few ports",
        "%cluster start 2 --ports 20000-20005",
        "WB-PLAN-173",
        "%cluster start 2",
    ),
    Mistake("An engine that does not exist", "%cluster restart 9", "WB-CLUSTER-006"),
    Mistake("A variable to push that does not exist", "%push no_such_name", "WB-PLAN-134"),
    Mistake(
        "wb.fit without a magic on top",
        "wb.fit(1, 2)",
        "WB-RUN-007",
    ),
    Mistake(
        "A framework that does not exist",
        fit("mirrored --framework jax"),
        "WB-PLAN-037",
    ),
    Mistake(
        "A lambda as a recipe",
        "with wb.Cluster(1) as mine:\n    mine.run(lambda: 1, strategy='mirrored')",
        "WB-PLAN-035",
    ),
]
