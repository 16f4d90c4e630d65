"""The command line of `workbench doctor`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .report import Report

ABOUT = """\
Checks whether Workbench can run on this machine. Each check prints a line that begins with its
result: ok, warn, FAIL, or "not known" (the check is not possible here). A line that begins with
"next:" says what you can do about the result above it.
Exit status: 0 if no check failed (there can be warnings), 1 if a check failed."""


def add_doctor_command(commands: Any) -> None:
    """Add `doctor` to the parser of `workbench`."""
    doctor = commands.add_parser(
        "doctor", help="check this machine, its GPUs, and other hosts", description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(doctor)


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = doctor.add_argument
    add("--json", action="store_true", help="print one JSON document, for programs")
    add("--on", metavar="HOST[,HOST]", default="", help="also check these hosts (over ssh)")
    add("--ports", metavar="A-B", default="",
        help="with --on: ports on which the notebook may listen")  # fmt: skip
    add("--listen", metavar="WHERE", default="",
        help="with --on: address, interface or network on which the notebook listens")  # fmt: skip
    add("--gpu-test", action="store_true",
        help="test whether Workbench works on this machine's GPUs, and write a report")  # fmt: skip
    add(
        "--on-cpu",
        action="store_true",
        help="with --gpu-test: run the test only on the CPU",
    )
    add("--quick", action="store_true", help="with --gpu-test: run a shorter test")
    add("--only", metavar="PART[,PART]", default="",
        help="with --gpu-test: run only these parts of the test")  # fmt: skip
    add(
        "--minutes",
        type=float,
        default=10.0,
        help="with --gpu-test: time limit in minutes (default 10)",
    )
    add(
        "--out",
        type=Path,
        help="with --gpu-test: folder for the report (default: workbench-gpu-test-DATE)",
    )
    add("--device", default="", help=argparse.SUPPRESS)  # a kind that discovery does not know,
    add("--gpus", type=int, help=argparse.SUPPRESS)  # and how many of it there are


def run_alone(argv: list[str]) -> int:
    """Run `python -m workbench doctor`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="workbench doctor", description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    return run_doctor(parser.parse_args(argv))


def run_doctor(given: argparse.Namespace) -> int:
    """Carry out the command line; return the exit status."""
    if given.gpu_test:
        return _gpu_test(given)
    report = examine(given.on, ports=given.ports, listen=given.listen)
    _print(report.json() if given.json else report.text())
    return report.exit_status


def examine(on: str = "", *, ports: str = "", listen: str = "") -> Report:
    """Run all checks; return the results.

    Args:
        on: Hosts to check too, separated by commas.
        ports, listen: Settings of the notebook, as for `%cluster start`.
    """
    from . import gpus, hosts, machine

    report = Report("doctor")
    began = time.perf_counter()
    report.add(machine.look())
    report.add(gpus.look())
    names = [name.strip() for name in on.split(",") if name.strip()]
    if names:
        report.add(hosts.look(names, ports=ports, listen=listen))
    report.seconds = time.perf_counter() - began
    return report


def _gpu_test(given: argparse.Namespace) -> int:
    from . import gpus

    gpus_here = 0 if given.on_cpu else gpus.count() if given.gpus is None else given.gpus
    device = given.device or ("cuda" if gpus_here else "cpu")
    if not given.on_cpu and not gpus_here and not given.device:
        print("No GPU was found, so all engines use the CPU.",
              file=sys.stderr)  # fmt: skip
    stages = gpus.STAGES
    only = tuple(name for name in given.only.split(",") if name)
    unknown = sorted(set(only) - {stage.name for stage in stages})
    if unknown:
        known = ", ".join(stage.name for stage in stages)
        words = f"--gpu-test has no part named {', '.join(unknown)}. The parts are: {known}"
        print(words, file=sys.stderr)
        return 2
    out = given.out or Path(time.strftime("workbench-gpu-test-%Y%m%d-%H%M%S"))
    asked = gpus.Asked(out.resolve(), device, gpus_here, given.quick, only, 60 * given.minutes)
    tell = (lambda text: print(text, file=sys.stderr)) if given.json else _print
    report = gpus.run(asked, tell)
    if given.json:
        print(report.json())
    elif report.failed:
        print("\n" + gpus.summary(report))
    tell(f"The report is in {out}/report.txt. If you report a problem in an issue, attach "
         f"{out}.zip, which contains all files of this test.")  # fmt: skip
    return report.exit_status


def _print(text: str) -> None:
    print(text, flush=True)
