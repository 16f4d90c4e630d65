"""Ten models, written as in public code, under every strategy for PyTorch, against one device.

    python benchmarks/bench_models.py [--models vit,lstm] [--strategies hybrid]

Each case is trained for a few steps on 2 workers (4 if the strategy forms a grid), by the contract
suite's harness. A case is `trained`, `refused` (Workbench's own error, with its words) or `failed`.
Synchronous strategies must end with the loss and the weights of one device. If a case may differ
(BatchNorm over shares, several steps of AdamW on shares), it says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / part) for part in ("tests/contract", "tests", "benchmarks")]

from worker_reports import Report, joined  # noqa: E402
from workers import Workers  # noqa: E402

from workbench import catalog  # noqa: E402
from workbench.shared import record  # noqa: E402  # noqa: E402

MODELS = (
    "nanogpt", "nanogpt_adamw", "resnet_groupnorm", "resnet_batchnorm", "lstm",
    "hf_gpt2", "hf_bert", "hf_llama", "vit", "encoder",
)  # fmt: skip
STEPS = 4
TOLERANCE = 1e-6  # Llama's norms compute in float32, whatever the model's type
OURS = ("FitError", "PlanError", "RunError")


def train(name: str, steps: int) -> None:
    """Train a model of the zoo: the cell."""
    import model_zoo
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    case = (model_zoo.CASES.get(name) or getattr(model_zoo, name))()
    fit(
        case.model, case.data, optimizer=case.optimizer, batch_size=12, steps=steps,
        **case.objective,
    )  # fmt: skip


def columns() -> list[str]:
    """Return the strategies. A strategy that can be asynchronous or synchronous has two columns."""
    return [
        label
        for entry in catalog.strategies("torch")
        for label in (
            entry.name, *([f"{entry.name}:{entry.sync_option}"] if entry.sync_option else [])
        )
    ]  # fmt: skip


def options_of(entry: catalog.Strategy, column: str) -> dict[str, Any]:
    """Return the options of a case: those with which the strategy is exact, if there are any."""
    _, _, option = column.partition(":")
    return {**dict(entry.exact_with or ()), **({option: True} if option else {})}


def differs(entry: catalog.Strategy, options: dict[str, Any], name: str) -> str:
    """Return why a case may differ from one device; empty if it must be equal."""
    if not entry.is_sync(options):
        return "asynchronous"
    if entry.exact_with is None:
        return "replicas drift apart by design"
    if entry.linear_only and name == "nanogpt_adamw":
        return "the mean of AdamW's steps is not the step of the mean"
    if name == "resnet_batchnorm" and entry.name not in ("one_device", "tensor_parallel"):
        return "BatchNorm sees shares"
    return ""


def weights_of(reports: list[Report]) -> dict[str, Any]:
    """Return the trained weights, joined if each worker holds a part."""
    if catalog.lookup(reports[0].strategy).whole:
        return reports[0].weights
    return dict(pair for report in reversed(reports) for pair in report.weights.items())


def loss_of(reports: list[Report]) -> float:
    """Return the loss of the last step."""
    return float(np.ravel(record.derive(joined(reports)).loss)[-1])


def run_case(workers: Workers, name: str, column: str, steps: int = STEPS) -> dict[str, Any]:
    """Train a model under a strategy; return the row of the table."""
    entry = catalog.lookup(column.partition(":")[0])
    options = options_of(entry, column)
    count = min(4 if entry.name == "hybrid" else 2, entry.max_workers or 4)
    began = time.perf_counter()
    reports = workers.run(entry.name, train, name, steps, workers=count, options=options)
    row: dict[str, Any] = {
        "model": name, "strategy": column, "workers": count,
        "may_differ": differs(entry, options, name), "seconds": time.perf_counter() - began,
    }  # fmt: skip
    errors = [report.error for report in reports if report.error]
    if errors:
        kind, _, text = errors[0].partition("\nTraceback")[0].partition(": ")
        outcome = "refused" if kind in OURS else "failed"
        return {**row, "outcome": outcome, "error": f"{kind}: {text}"}
    truth = workers.truth(train, name, steps)
    mine = weights_of(reports)
    missing = sorted(truth.weights.keys() - mine.keys())
    off = max(float(abs(mine[key] - value).max()) for key, value in truth.weights.items()
              if key in mine)  # fmt: skip
    off_loss = abs(loss_of(reports) - loss_of([truth])) if entry.is_sync(options) else 0
    outcome = "trained"
    if missing or (not row["may_differ"] and max(off, off_loss) > TOLERANCE):
        outcome = "differs"
    return {**row, "outcome": outcome, "off_weights": off, "off_loss": off_loss, "missing": missing}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the matrix: the largest difference of a weight, or the outcome of the case."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    lines = ["".join(f"{text.replace('parameter_', '')[:15]:>16}" for text in ("", *strategies))]
    for name in dict.fromkeys(row["model"] for row in rows):
        found = {row["strategy"]: row for row in rows if row["model"] == name}
        cells = [
            f"{found[s]['off_weights']:.0e}" + ("*" if found[s]["may_differ"] else "")
            if found[s]["outcome"] == "trained"
            else found[s]["outcome"].upper()
            for s in strategies
        ]
        lines.append("".join(f"{text:>16}" for text in (name, *cells)))
    counts = {kind: sum(row["outcome"] == kind for row in rows)
              for kind in ("trained", "refused", "differs", "failed")}  # fmt: skip
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return "\n".join([*lines, "", f"{len(rows)} cases: {said}; * may differ from one device"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=",".join(columns()))
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    workers = Workers(2)
    rows = []
    try:
        for name in given.models.split(","):
            for strategy in given.strategies.split(","):
                rows.append(row := run_case(workers, name, strategy, given.steps))
                if row["outcome"] != "trained":
                    print(f"{name} under {strategy}: {row['outcome']}: {row.get('error', row)}")
    finally:
        workers.close()
    print(table(rows))
    trained = sum(row["outcome"] == "trained" for row in rows)
    result = {"what": "models x strategies", "cases": len(rows), "trained": trained}
    print(json.dumps({**result, "rows": rows}))


if __name__ == "__main__":
    main()
