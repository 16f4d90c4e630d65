"""Where a run is also written to: `--log tensorboard:DIR`, `--log mlflow:URI`,
`--log wandb:PROJECT`, `--log trackio:PROJECT`.

This module is pure: the code that writes checks whether it can write (`execution/logging_to.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import PlanError

KINDS = ("tensorboard", "mlflow", "wandb", "trackio")
ALLOWED = "tensorboard:DIR, mlflow:URI, wandb:PROJECT, trackio:PROJECT"
PROJECT_LETTERS = 128
"""The maximum length of a project's name, by W&B's rules."""
STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "file")
"""Schemes of MLflow's stores."""
_URIS = (
    "sqlite:///mlflow.db, http://HOST:5000, file:mlruns, or a database's URI. If there is no URI "
    "(`mlflow:`), MLflow uses the environment variable MLFLOW_TRACKING_URI"
)


PACKAGES = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
"""The package that each kind imports; the distribution's extra has the same name as the kind."""


@dataclass(frozen=True)
class Target:
    """One place to which a run is written.

    Attributes:
        kind: One of `KINDS`.
        where: A folder (absolute), a tracking URI (empty: from MLflow's environment), or a project.
            For W&B it can include the owner: `ENTITY/PROJECT`.
    """

    kind: str
    where: str

    @property
    def text(self) -> str:
        """The target as it is written: `tensorboard:/home/me/runs`."""
        return f"{self.kind}:{self.where}"


def parse_target(text: str) -> Target:
    """Read one of `ALLOWED`; paths are relative to the current folder.

    Raises:
        PlanError: It is not one of them, or the part after the colon is malformed.
    """
    kind, _, where = text.strip().partition(":")
    if kind not in KINDS:
        raise PlanError(
            "--log does not know this type of target.",
            seen=_short(text),
            allowed=ALLOWED,
            code="WB-PLAN-140",
        )
    if any(not char.isprintable() for char in where):
        raise PlanError(
            "The log target contains a line break or control character.",
            seen=_short(text),
            allowed=ALLOWED,
            code="WB-PLAN-141",
        )
    if kind == "tensorboard":
        return Target(kind, _folder(where, text))
    return Target(kind, _store(where) if kind == "mlflow" else _project(kind, where.strip()))


def parse_targets(texts: Iterable[str]) -> tuple[str, ...]:
    """Return targets as `Target.text`, each once.

    Raises:
        PlanError: A target is not valid.
    """
    if isinstance(texts, str):
        texts = [texts]
    return tuple(dict.fromkeys(parse_target(text).text for text in texts))


def _folder(where: str, text: str) -> str:
    if not where.strip() or "://" in where:
        raise PlanError(
            "A TensorBoard target must be a folder on this machine.",
            seen=_short(text),
            allowed="tensorboard:DIR",
            next_step="--log tensorboard:runs",
            code="WB-PLAN-142",
        )
    return _absolute(where)


def _store(where: str) -> str:
    if where.strip() in ("", "databricks"):
        return where.strip()
    scheme, colon, rest = where.partition(":")
    kind = scheme.partition("+")[0].lower()
    if not colon or kind not in STORES:
        raise PlanError(
            "An MLflow target must be the URI of a database, a server or a folder.",
            seen=_short(where),
            allowed=_URIS,
            next_step="--log mlflow:sqlite:///mlflow.db",
            code="WB-PLAN-143",
        )
    if kind == "sqlite":
        return _sqlite(where, scheme, rest)
    if kind == "file":
        path = rest.removeprefix("//")
        if not path:
            raise PlanError(
                "The URI does not name a folder.",
                seen=where,
                allowed="file:mlruns",
                code="WB-PLAN-144",
            )
        return f"file://{_absolute(path)}"
    _check_host(where)
    return where


def _sqlite(where: str, scheme: str, rest: str) -> str:
    match = re.fullmatch(r"///([^?#]+)", rest)
    if match is None or match[1].endswith("/"):
        raise PlanError(
            "The URI does not name a database file.",
            seen=_short(where),
            allowed="sqlite:///mlflow.db, or sqlite:////home/me/mlflow.db for an absolute path",
            code="WB-PLAN-145",
        )
    return f"{scheme}:///{_absolute(match[1])}"


def _check_host(where: str) -> None:
    try:
        parts = urlsplit(where)
        host, secret, _ = parts.hostname, parts.password, parts.port
    except ValueError:
        host = secret = None
    if not host or " " in where:
        seen = _short(re.sub(r"//[^/@]*@", "//***@", where))  # it may hold a password
        raise PlanError("MLflow's URI is malformed.", seen=seen, allowed=_URIS, code="WB-PLAN-146")
    if secret is not None:
        raise PlanError(
            "The URI contains a password, which would be saved with the run.",
            seen=f"{parts.scheme}://{parts.username}:***@{host}",
            allowed="a URI without a password",
            next_step="put the whole URI into the environment variable MLFLOW_TRACKING_URI, and "
            "write `--log mlflow:` without a URI",
            code="WB-PLAN-147",
        )


def _project(kind: str, where: str) -> str:
    if kind == "wandb":
        names, allowed = where.split("/"), "wandb:PROJECT, wandb:ENTITY/PROJECT"
        good, signs = len(names) <= 2 and not re.search(r"[\\#?%:]", where), r"\ # ? % :"
    else:
        names, allowed = [where], "trackio:PROJECT"
        good = not re.search(r"[/\\:]", where) and bool(re.search(r"\w", where))
        signs = r"/ \ :"
    if not good or not all(0 < len(name.strip()) <= PROJECT_LETTERS for name in names):
        raise PlanError(
            "This is not a valid project name.",
            seen=_short(f"{kind}:{where}"),
            allowed=f"{allowed}. Each name has 1 to {PROJECT_LETTERS} characters. These characters "
            f"are not allowed: {signs}",
            next_step=f"--log {kind}:lessons",
            code="WB-PLAN-246",
        )
    return "/".join(name.strip() for name in names)


def _absolute(where: str) -> str:
    return str(Path(os.path.expanduser(where.strip())).absolute())


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
