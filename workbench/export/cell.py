"""Checks a cell that will run elsewhere: is it Python, and what does it use from its notebook.

Names, modules and files of the notebook are found by reading the cell, not by running it. Doubtful
cases are not refused, so that a cell that runs in its notebook is not refused without reason.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import PlanError, nearest

ENGINE_NAMES = frozenset(
    {"rank", "local_rank", "world_size", "device", "wb", "dist", "strategy"}
)  # fmt: skip
"""Names that a cell can use without defining them."""
NOTEBOOKS_OWN = frozenset({"display", "get_ipython", "In", "Out"})
"""Names that only IPython has, some of them among a kernel's builtins."""

_MAGIC = re.compile(r"^\s*(?:[\w.,\s\[\]()*]+=\s*)?(%{1,2}|!{1,2}|\?{1,2})\s*(\w+)?|\?{1,2}\s*$")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""Line ends as Python counts them; str.splitlines also splits at form feeds and others."""
_INSTEAD = {
    "%matplotlib": (
        "remove the line, because a script cannot show figures in the notebook. To write a figure "
        "to a file, use plt.savefig(...)"
    ),
    "%pip": "remove the line, and add the package to requirements.txt of the job folder",
    "%time": "remove the line (Workbench measures every step), or use time.perf_counter()",
    "%env": "write os.environ[...] = ... instead",
    "%run": "import what you need from the file, and send the file with the job: files=[...]",
    "!": "write subprocess.run([...], check=True) instead",
    "?": "remove the line, and call help(...) in the notebook instead",
}


@dataclass(frozen=True)
class Cell:
    """A cell that was checked to be Python.

    Attributes:
        text: The lines of the cell; `from __future__` imports are replaced by comments.
        future: Those imports, for the top of the file.
        tree: Its syntax.
    """

    text: str
    future: tuple[str, ...]
    tree: ast.Module


def read_cell(source: str) -> Cell:
    """Check that a cell is Python code for a file.

    Raises:
        PlanError: The cell is not; the error names the line.
    """
    try:
        tree = ast.parse(source)
        source.encode()
        # ast.parse lets `await` and `return` outside of functions pass.
        compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise _no_python(source, error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise _no_python(source, SyntaxError(str(error))) from None
    if found := next(_awaits(tree.body), None):
        raise PlanError(
            "The cell uses `await` outside a function. This works only in a notebook.",
            seen=f"line {found.lineno}: {_line(source, found.lineno)}",
            allowed="`await` in a function that begins with async def",
            next_step="put the code into async def main(): ..., and call asyncio.run(main())",
            code="WB-PLAN-203",
        )
    text, future = source, []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(ast.unparse(node))
            text = _without(text, node)
    return Cell(text if text.endswith("\n") else text + "\n", tuple(future), tree)


def _no_python(source: str, error: SyntaxError) -> PlanError:
    number = error.lineno or 1
    line = _line(source, number)
    magic = _MAGIC.search(line)
    first = next((text for text in source.splitlines() if text.strip()), "")
    if first.lstrip().startswith("%%"):
        line, magic = first, _MAGIC.search(first)
        number = source[: source.index(first)].count("\n") + 1
    if magic is None:
        return PlanError(
            "The cell is not valid Python.",
            seen=f"line {number}: {line.strip()} ({error.msg})",
            next_step="run the cell in the notebook, which shows where the error is",
            code="WB-PLAN-204",
        )
    mark, word = (magic[1] or "?")[0], magic[2] or ""
    if mark == "!" and word in ("pip", "conda", "uv"):
        mark, word = "%", "pip"
    kinds = {"timeit": "time", "conda": "pip", "set_env": "env", "load": "run"}
    key = f"%{kinds.get(word, word)}" if mark == "%" else mark
    return PlanError(
        "The cell contains a line that works only in a notebook, not in a script.",
        seen=f"line {number}: {line.strip()}",
        allowed="Python",
        next_step=_INSTEAD.get(key, "remove the line, or replace it with Python code"),
        code="WB-PLAN-202",
    )


def _line(source: str, number: int) -> str:
    lines = _LINE.findall(source)
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _awaits(nodes: Iterable[ast.AST]) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes that await outside functions."""
    for node in nodes:
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            yield node
        if not isinstance(node, _SCOPES):
            if any(c.is_async for c in getattr(node, "generators", ())):
                assert isinstance(node, ast.expr)
                yield node
            yield from _awaits(ast.iter_child_nodes(node))


def _without(text: str, node: ast.ImportFrom) -> str:
    """Return the text with an import at the top made a comment; lines keep their numbers."""
    lines = _LINE.findall(text)
    last = node.end_lineno or node.lineno
    head, tail = lines[node.lineno - 1].encode(), lines[last - 1].encode()
    before, after = head[: node.col_offset], tail[node.end_col_offset :]
    if before.strip() or after.strip().lstrip(b";").strip()[:1] not in (b"", b"#"):
        middle = "\\\n" * (last - node.lineno)  # other statements stand on its lines
        lines[node.lineno - 1 : last] = [before.decode() + "pass" + middle + after.decode()]
        return "".join(lines)
    for number in range(node.lineno - 1, last):
        lines[number] = f"# {lines[number]}"
    return "".join(lines)


def check_cell(
    source: str,
    *,
    names: Mapping[str, object] | None = None,
    folder: Path,
    files: Sequence[Path] = (),
) -> list[str]:
    """Find the names, modules and files that a cell would lack elsewhere.

    Args:
        names: The notebook's variables by name; None: unknown.
        folder: The notebook's folder, for relative paths.
        files: The files that are sent with the cell.

    Returns:
        Sentences for the user on things that can be missing.

    Raises:
        PlanError: The cell uses names that it does not define, or files of the notebook's folder
            that are not sent; or it is not Python.
    """
    tree = read_cell(source).tree
    missing = _missing_names(source, tree)
    if missing:
        raise PlanError(
            "The cell uses names that it does not define, so they will not exist in the job.",
            seen=", ".join(f"{name} (line {line})" for name, line in sorted(missing.items())),
            allowed="names that the cell defines or imports, and "
            f"{', '.join(sorted(ENGINE_NAMES))}; values from %push do not reach a job",
            next_step="; ".join(_advice(name, names) for name in sorted(missing)),
            code="WB-PLAN-205",
        )
    here = folder.absolute()
    travel = {(here / file).resolve() for file in files}
    stay, lost = [], []
    for path, line in _paths(tree):
        if not (here / path).exists():
            lost.append(f"line {line} reads {path}, which the notebook's folder does not contain: "
            "the file must exist where the job runs")  # fmt: skip
        elif not {(here / path).resolve(), *(here / path).resolve().parents} & travel:
            stay.append((path, line))
    for module, line in _modules(tree):
        for path in (f"{module}.py", module):
            is_there = (here / path).is_file() or (here / path / "__init__.py").is_file()
            if is_there and (here / path).resolve() not in travel:
                stay.append((path, line))
                break
    if stay:
        given = [str(file) for file in files] + list(dict.fromkeys(path for path, _ in stay))
        raise PlanError(
            "The cell reads files that are not sent with the job.",
            seen=", ".join(f"{path} (line {line})" for path, line in stay),
            allowed="files that are sent with the job. The job runs in its own folder, not in the "
            "notebook's folder",
            next_step=f"pass files={given!r} to the call that writes the job (wb.job, run.to_job "
            "or wb.submit), or use an absolute path that exists where the job runs",
            code="WB-PLAN-206",
        )
    return lost


def _advice(name: str, names: Mapping[str, object] | None) -> str:
    if name in NOTEBOOKS_OWN:
        return f"remove {name}, because a script does not have it" + (
            " (use print to show values)" if name == "display" else ""
        )
    if names is None or name not in names:
        guess = nearest(name, names) if names else None
        spelled = f" (did you mean {guess}?)" if guess and not guess.startswith("_") else ""
        unknown = "" if names is None else " (the notebook does not define it)"
        return f"define {name} in the cell{unknown}{spelled}"
    value = names[name]
    if isinstance(value, ModuleType):
        alias = "" if value.__name__ == name else f" as {name}"
        return f"import {value.__name__}{alias}"
    module = getattr(value, "__module__", None)
    called = getattr(value, "__name__", None)
    if isinstance(module, str) and module not in ("__main__", "builtins") and called:
        return f"from {module} import {called}{'' if called == name else f' as {name}'}"
    if callable(value) and called:
        return f"copy the definition of {name} into the cell"
    kind = type(value).__name__
    return f"write {name} = ... in the cell (in the notebook, {name} has the type {kind})"


def _missing_names(source: str, tree: ast.Module) -> dict[str, int]:
    """Return the names that a cell reads but that are not defined, with their first lines."""
    bare = _Evaluated(tree).visit(ast.parse(source))
    if any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree)):
        return {}
    if any(_calls(node) in ("exec", "globals", "locals", "vars") for node in ast.walk(tree)):
        return {}  # names may come from anywhere
    defined, read = set(), set()
    tables = [_scopes(bare)]
    for table in tables:  # grows meanwhile
        on_top = str(table.get_type()) == "module"
        for symbol in table.get_symbols():
            if (on_top or symbol.is_declared_global()) and (
                symbol.is_assigned() or symbol.is_imported()
            ):
                defined.add(symbol.get_name())
            if symbol.is_referenced() and (on_top or symbol.is_global()):
                read.add(symbol.get_name())
        tables += table.get_children()
    known = {*dir(builtins), *ENGINE_NAMES} - NOTEBOOKS_OWN | _guarded(tree)
    known |= {"__file__", "exit", "quit"}  # IPython hides the two from its kernel
    missing = {name for name in read - defined - known if not name.startswith("__")}
    missing |= _too_early(tree) - known
    first: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in missing:
            first[node.id] = min(first.get(node.id, node.lineno), node.lineno)
    return {name: first.get(name, 1) for name in missing}


def bound_on_top(tree: ast.Module) -> set[str]:
    """Return the names that the top level assigns."""
    table = _scopes(ast.parse(ast.unparse(tree)))
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def _scopes(tree: ast.Module) -> symtable.SymbolTable:
    """Return the scopes of a cell, with comprehensions as generators; changes the cell."""
    scoped = ast.fix_missing_locations(_Scoped().visit(tree))
    return symtable.symtable(ast.unparse(scoped), "cell", "exec")


class _Scoped(ast.NodeTransformer):
    """Turns comprehensions into generators, because since Python 3.12 they have no separate scope.

    Otherwise their names would count as the cell's, and names bound by `:=` as not bound.
    """

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self.visit_ListComp(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


class _Evaluated(ast.NodeTransformer):
    """Removes annotations that are not evaluated: those of local names, or all."""

    def __init__(self, tree: ast.Module) -> None:
        future = (n for n in tree.body if isinstance(n, ast.ImportFrom))
        self._none = any(
            n.module == "__future__" and a.name == "annotations" for n in future for a in n.names
        )
        self._local = 0

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if self._none or self._local:
            node.annotation = ast.Constant(None)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._local = self._local, 0
        self.generic_visit(node)
        self._local = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._local += 1
        self.generic_visit(node)
        self._local -= 1
        if self._none:
            node.returns = None
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if self._none:
            node.annotation = None
        return node


def _calls(node: ast.AST) -> str:
    """Return the last name of the called function."""
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _guarded(tree: ast.Module) -> set[str]:
    """Return the names whose existence the cell checks before it uses them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            caught = [ast.unparse(h.type) if h.type else "Exception" for h in node.handlers]
            if any(kind in text for text in caught for kind in ("NameError", "Exception")):
                parts = (part for one in node.body for part in ast.walk(one))
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Compare) and _calls(node.comparators[0]) == "dir":
            left = node.left
            found |= {str(left.value)} if isinstance(left, ast.Constant) else set()
    return found


def _too_early(tree: ast.Module) -> set[str]:
    """Return the names that the cell's top level reads before it assigns them."""
    bound = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    early = set()
    for statement in tree.body:
        inside = {
            n.id for n in ast.walk(statement) if isinstance(n, ast.NamedExpr) for n in [n.target]
        }
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
            early |= set(_evaluated(statement.value)) - bound - inside
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                early |= {statement.target.id} - bound
        bound |= bound_on_top(ast.Module([statement], []))
    return early & bound  # the others are missing anyway


def _evaluated(node: ast.AST) -> Iterator[str]:
    """Yield the names that an expression certainly reads, in its scope."""
    if isinstance(node, ast.Name):
        yield node.id
    if not isinstance(
        node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    ):
        for child in ast.iter_child_nodes(node):
            yield from _evaluated(child)


_READERS = frozenset({
    "open", "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "imread", "ImageFolder",
    "DatasetFolder", "load_from_disk", "image_dataset_from_directory", "TextLineDataset",
    "TFRecordDataset", "read_file", "load_model", "load_weights", "File", "ZipFile", "loadmat",
    "read_image", "load_file", "open_dataset", "text_dataset_from_directory", "read_text",
    "read_bytes",
})  # fmt: skip
_AS = frozenset({"file", "path", "root", "fname", "filename", "filepath", "directory",
                 "filepath_or_buffer", "filenames", "path_or_buf", "f"})  # fmt: skip


_LISTERS = frozenset({"listdir", "scandir", "walk", "glob", "iglob", "rglob", "iterdir"})
_WRITERS = re.compile(r"(save|write_|to_|dump)\w*")


def _written(tree: ast.Module, texts: Mapping[str, str]) -> set[str]:
    """Return the paths that the cell writes; they do not have to exist before."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (_WRITERS.match(_calls(node)) or _opens_to_write(node)):
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            values = [*owner, *node.args, *(word.value for word in node.keywords)]
            found |= {_text(one, texts) for one in values}
    return found


def _opens_to_write(node: ast.Call) -> bool:
    modes = [*(word.value for word in node.keywords if word.arg == "mode"), *node.args[:2]]
    return any(isinstance(m, ast.Constant) and re.fullmatch(r"[wax][bt+]*", str(m.value))
               for m in modes)  # fmt: skip


def _paths(tree: ast.Module) -> list[tuple[str, int]]:
    """Return the relative paths that a cell certainly reads, with their lines."""
    texts = _constants(tree)
    own, found = _written(tree, texts), []
    for node in ast.walk(tree):
        called = _calls(node)
        lists = called in _LISTERS
        reads = lists or called in _READERS or called.startswith("read_")
        if not isinstance(node, ast.Call) or not reads or _opens_to_write(node):
            continue
        words = {word.arg: word.value for word in node.keywords if word.arg}
        given = [*node.args[:1], *(value for name, value in words.items() if name in _AS)]
        if isinstance(node.func, ast.Attribute) and (
            lists or called in ("open", "read_text", "read_bytes")
        ):
            given.insert(0, node.func.value)  # Path("x").open()
        path = next((text for one in given if (text := _text(one, texts))), "")
        if lists:  # of a pattern, the folder before it
            path = re.split(r"[^/]*[*?\[]", path, maxsplit=1)[0].rstrip("/") if path else ""
        plain = re.match(r"\w+:|[/~\\]|\.*$", path) is None and path.strip() == path
        sure = path and (lists or Path(path).suffix or "/" in path)
        if sure and plain and "download" not in words and path not in own:
            found.append((path, node.lineno))
    return list(dict.fromkeys(found))


def _constants(tree: ast.Module) -> dict[str, str]:
    """Return names with one constant text in the whole cell."""
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts[node.id] = counts.get(node.id, 0) + 1
    texts: dict[str, str] = {}
    for one in tree.body:
        if isinstance(one, ast.Assign) and len(one.targets) == 1:
            target = one.targets[0]
            if isinstance(target, ast.Name) and counts[target.id] == 1:
                texts[target.id] = _text(one.value, texts)
    return texts


def _text(node: ast.AST, texts: Mapping[str, str]) -> str:
    """Return the path that an expression certainly is; empty: unknown."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        return texts.get(node.id, "")
    parts: list[Any] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = [node.left, node.right]
    elif _calls(node) in ("Path", "PosixPath", "join", "str", "open"):
        parts = getattr(node, "args", [])[: 1 if _calls(node) in ("str", "open") else None]
    known = [_text(part, texts) for part in parts]
    return str(Path(*known)) if known and all(known) else ""


def _modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the top names of the modules that a cell imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno


def imported(source: str) -> list[str]:
    """Return the top names of the modules that a source imports, in alphabetical order."""
    return sorted({module for module, _ in _modules(ast.parse(source))})
