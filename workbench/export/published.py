"""The data of envelopes, their templates, and the checks of both against the platforms.

A template is a shell or Python script, or a document of JSON that is written as YAML. In a script,
`@{name}` stands for a value in the quotes of its language, `@{*name}` for several, `@{!name}` for
text of ours as it is, and a line that begins with `@{?name}` is kept only if this value exists. In
a document, a string that is `${name}` becomes the value itself, so that no value can become syntax.
Values that are None are left out, and also objects whose "?" names a value that is None.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import PlanError

HERE = Path(__file__).parent
_VALUE = re.compile(r"\$\{(\w+)\}")
_MARK = re.compile(r"@\{([!*]?)(\w+)\}")
_PLAIN = re.compile(r"[A-Za-z$/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Texts that YAML does not read as text."""
_KEPT = re.compile(r"@\{\?(\w+)\}")

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Envelope:
    """How jobs are started on a platform.

    Attributes:
        name: As in `wb.submit(plan, on=NAME)`.
        summary: One line about the platform.
        files: Template of each file that is written.
        deep: Whether it includes code, environment, data, credentials and records. Otherwise the
            user must add some of these.
        validated: Whether it was executed, or only checked against a schema.
        note: How it was checked.
        schema: The schema for its check: a file of schemas/, and a definition in it.
        frameworks: The frameworks that it can start.
        limit: Largest number of nodes; 0: no limit.
        start: The command that starts it, in the job folder.
        records: How its records come back.
        any_name: Whether a job can have any name.
        needs: Required fields of `Resources`.
    """

    name: str
    summary: str
    files: Mapping[str, str]
    deep: bool
    validated: Literal["executed", "schema"]
    note: str
    schema: str
    frameworks: Sequence[str]
    limit: int
    start: str
    records: str
    any_name: bool = False
    needs: Sequence[str] = ()


def template_text(name: str) -> str:
    return (HERE / "templates" / name).read_text(encoding="utf-8")


ENVELOPES: Mapping[str, Envelope] = {
    name: Envelope(name, **about)
    for name, about in json.loads(template_text("envelopes.json")).items()
}


# -- templates -------------------------------------------------------------------------------------


class Exactly(dict[str, Any]):
    """A mapping whose None values are kept, because None has a meaning there."""


def filled_script(template: str, values: Values, quote: Callable[[str], str]) -> str:
    """Return a script's text with its values in the quotes of its language."""

    def of(found: re.Match[str]) -> str:
        how, value = found[1], values[found[2]]
        if how == "!":
            return str(value)
        if how == "*":
            return " ".join(quote(str(one)) for one in value)
        return quote(value if quote is ascii else str(value))

    lines = []
    for line in template.splitlines():
        if kept := _KEPT.match(line):
            if not values[kept[1]]:
                continue
            line = line[kept.end() :]
        lines.append(_MARK.sub(of, line))
    return "\n".join(lines) + "\n"


def filled_python(envelope: Envelope, template: str, values: Values) -> str:
    text = filled_script(template, values, ascii)
    check_calls(envelope, text)
    return text


def filled_documents(template: str, values: Values) -> list[Any]:
    """Return a template's documents with their values in place."""
    made: list[Any] = _filled(json.loads(template_text(template)), values)
    return made


def _filled(node: Any, values: Values) -> Any:
    if isinstance(node, str):
        if whole := _VALUE.fullmatch(node):
            return values[whole[1]]
        return _VALUE.sub(lambda found: str(values[found[1]]), node)
    if isinstance(node, list):
        return [made for one in node if (made := _filled(one, values)) is not None]
    if not isinstance(node, dict):
        return node
    if "?" in node and not values[node["?"]]:
        return None
    made = {key: _filled(one, values) for key, one in node.items() if key != "?"}
    kept = {key: one for key, one in made.items() if one is not None}
    return kept if kept or not node else None


def as_yaml(documents: Sequence[Any]) -> str:
    """Return YAML; texts are JSON strings, which are valid YAML, or blocks if no character needs an
    escape.
    """
    return "---\n".join("\n".join(_yaml_lines(one, "")) + "\n" for one in documents)


def _yaml_lines(node: Any, indent: str) -> Iterator[str]:
    if isinstance(node, dict) and node:
        for key, one in node.items():
            yield from _yaml_item(f"{indent}{_yaml_text(key)}:", one, indent)
    elif isinstance(node, list) and node:
        for one in node:
            yield from _yaml_item(f"{indent}-", one, indent)
    else:
        yield indent + _yaml_text(node)


def _yaml_item(head: str, node: Any, indent: str) -> Iterator[str]:
    if isinstance(node, dict | list) and node:
        lines = list(_yaml_lines(node, indent + "  "))
        if head.endswith("-"):
            yield f"{head} {lines[0].lstrip(' ')}"
            lines = lines[1:]
        else:
            yield head
        yield from lines
    elif isinstance(node, str) and _reads_as_it_is(node):
        yield f"{head} |2" + ("" if node.endswith("\n") else "-")
        body = node.removesuffix("\n").split("\n")
        yield from (f"{indent}  {line}" if line else "" for line in body)
    else:
        yield f"{head} {_yaml_text(node)}"


def _reads_as_it_is(text: str) -> bool:
    """Whether lines of text can be a block without escapes."""
    lines = text.removesuffix("\n").split("\n")
    plain = len(lines) > 1 and lines[-1].strip() != ""
    return plain and all(line.replace("\t", " ").isprintable() for line in lines)


def _yaml_text(node: Any) -> str:
    if isinstance(node, str) and _PLAIN.fullmatch(node) and node.lower() not in _WORDS:
        return node
    pair = r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})"

    def whole(found: re.Match[str]) -> str:
        high, low = int(found[1], 16), int(found[2], 16)
        return f"\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"

    return re.sub(pair, whole, json.dumps(node))


# -- what the platforms publish --------------------------------------------------------------------


@cache
def schema(name: str) -> dict[str, Any]:
    """Return a file of schemas/."""
    found: dict[str, Any] = json.loads((HERE / "schemas" / f"{name}.json").read_text())
    return found


def check_document(envelope: Envelope, document: Any, name: str, definition: str = "") -> None:
    """Raise PlanError if a platform's schema refuses a document."""
    from jsonschema import Draft202012Validator

    rules = schema(name)
    if definition:
        rules = {"$ref": f"#/$defs/{definition}", "$defs": rules["$defs"]}
    errors = sorted(
        Draft202012Validator(rules).iter_errors(document), key=lambda one: len(one.path)
    )
    if errors:
        inner = errors[0].context or errors[:1]  # of alternatives, the one that knows a key less
        first = min(inner, key=lambda one: one.validator != "additionalProperties")
        where = "/".join(map(str, errors[0].absolute_path)) or "the document"
        raise PlanError(
            f"The job's files do not match the schema of the platform `{envelope.name}`.",
            seen=f"{where}: {first.message[:300]}",
            allowed=envelope.note,
            next_step="correct this value. If you did not set this value, the platform may have "
            "changed: report this message to the authors of Workbench",
            code="WB-PLAN-234",
        )


def check_options(envelope: Envelope, script: str) -> None:
    """Raise PlanError if a script gives torchrun, srun or sbatch an unknown option."""
    known = schema("options")
    for line in script.replace("\\\n", " ").splitlines():
        sbatch = line.startswith("#SBATCH")
        words = line.split("#SBATCH")[1].split() if sbatch else line.split()
        at, command = (0, "sbatch") if sbatch else (-1, "")
        if line.startswith("#") and not sbatch:
            continue
        for number, word in enumerate(words):
            if word in ("srun", "torchrun", "torch.distributed.run"):
                at, command = number + 1, "srun" if word == "srun" else "torchrun"
            elif number == at and word.startswith("--"):
                at += 1
                option = word[2:].partition("=")[0]
                if option not in known[command]:
                    raise PlanError(
                        f"The command `{command}` does not have this option.",
                        seen=f"--{option}",
                        allowed=", ".join(known[command]),
                        next_step="report this message to the authors of Workbench, because the "
                        f"files for the platform `{envelope.name}` are wrong",
                        code="WB-PLAN-235",
                    )


def check_calls(envelope: Envelope, script: str) -> None:
    """Raise PlanError if a script calls an unknown function of its library, or with wrong
    arguments.
    """
    known: dict[str, list[str]] = {}
    for name in ("ray", "spark", "sagemaker", "monarch"):
        known |= schema(name)
    ours = {name.rpartition(".")[0] for name in known}
    tree = ast.parse(script)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ours:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    returns = {"monarch.job.spmd.serve": "monarch.job.spmd.SPMDJob"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = names.get(ast.unparse(node.value.func), "")
            if made and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = returns.get(made, made)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        called = names.get(first, "") + dot + rest
        if first not in names or (dot and called not in known):
            continue
        given = [one.arg or "**" for one in node.keywords]
        parameters = known.get(called)
        wrong = [one for one in given if parameters is not None and one not in parameters]
        if parameters is None or wrong or len(node.args) + len(given) > len(parameters):
            raise PlanError(
                f"The library of `{envelope.name}` does not have this function."
                if parameters is None
                else f"This function of `{envelope.name}` does not take these arguments.",
                seen=f"{called}({', '.join(wrong or given)})",
                allowed=", ".join(parameters) if parameters else None,
                next_step="report this message to the authors of Workbench, because the files "
                f"for the platform `{envelope.name}` are wrong",
                code="WB-PLAN-236",
            )
