"""`python -m workbench`: the `workbench` command, also from a checkout that is not installed."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; return its exit status."""
    if sys.argv[1:2] == ["doctor"]:  # it also works if the rest of the package cannot be loaded
        from .doctor.command import run_alone

        return run_alone(sys.argv[2:])
    if sys.argv[1:2] == ["run"]:
        from .jobs.here import is_rank, run_rank

        if (
            is_rank()
        ):  # torchrun has started this process: it is an engine and does not load the command line
            return run_rank(sys.argv[2:])
    try:
        from .cli import main as all_commands
    except ModuleNotFoundError as error:
        print(
            f"The package {error.name} is not installed. "
            "`python -m workbench doctor` lists all missing packages.",
            file=sys.stderr,
        )
        return 1
    return all_commands()


if __name__ == "__main__":
    sys.exit(main())
