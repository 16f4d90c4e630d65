"""`%cluster`, `%%distributed`, `%%rank`, `%push`, `%pull`: parse lines and call the session."""

from __future__ import annotations

import ast
from itertools import pairwise
from types import ModuleType
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from . import catalog
from .cluster.hosts.configuration import known_launchers
from .cookbook.recipe import Recipe
from .devices import limits
from .errors import ClusterError, PlanError, RunError
from .execution import registry
from .execution.allocator import notebook_framework
from .execution.outcome import outcome_behind, refusals
from .execution.paused import write_out as write
from .notebook.auto import chooses, train_chosen
from .notebook.completion import limit_completion
from .notebook.jobs import job, job_line
from .notebook.recipes import recipes
from .notebook.run_view import kept_words, show_attached
from .notebook.session import Session, session
from .notebook.values import pull_values, push_values
from .session.debug import debug
from .session.logs import logs as show_logs
from .shared.magic_args import (
    ACTIONS,
    ClusterLine,
    cluster_parser,
    parse_cluster_line,
    parse_ranks,
    strip_comment,
)
from .shared.plan import plan_of
from .shared.run_request import AUTO, FLAGS, RunRequest, cell_parser, parse_cell_line
from .views import places
from .views.blocks import ProgressLine, in_notebook, show

BODY_LINE = 2
"""A cell's body begins on its second line, below the magic."""


@magics_class
class WorkbenchMagics(Magics):
    """The notebook's commands."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._noted: set[str] = set()

    @property
    def session(self) -> Session:
        """The notebook's session."""
        return session

    @line_magic
    def cluster(self, line: str) -> None:
        """Start, show and stop engines; see `%cluster?`."""
        asked = parse_cluster_line(line)
        if asked.action == "start":
            self._start(asked)
        elif asked.action == "attach":
            self._attach(asked)
        elif asked.action == "stop":
            session.stop()
            print("cluster stopped")  # noqa: T201 - the answer to a command
        elif asked.action == "restart":
            cluster = session.need_cluster()
            cluster.restart(asked.ranks or None)
            show(cluster.status())
        elif asked.action == "logs":
            show_logs(
                session.need_cluster(), asked.ranks, asked.lines, write, following=asked.follow
            )
        elif asked.action == "stacks":
            show(session.need_cluster().stacks(asked.ranks or None))
        elif asked.action == "debug":
            debug(session.need_cluster(), asked)
        elif asked.action == "free":
            cluster = session.need_cluster()
            had = cluster.pool.devices.held
            cluster.free()
            also = (
                "; other processes can use the engines' GPUs until the next cell or run"
                if had
                else ""
            )
            print(f"the variables of earlier cells were deleted on all engines{also}")  # noqa: T201
        else:
            show(session.need_cluster().status())

    def _start(self, asked: ClusterLine) -> None:
        progress = ProgressLine()
        settings: dict[str, Any] = {"framework": asked.framework, **asked.launch}
        settings |= {"keep": asked.keep, "idle_timeout": asked.idle_timeout}
        if asked.devices is not None:
            settings["devices"] = asked.devices
        try:
            with limits.telling(self._note):
                cluster = session.start(asked.count, progress=progress, **settings)
        except KeyboardInterrupt:
            progress.done()
            raise ClusterError(
                "The start of the engines was interrupted. No engine runs, and no job is queued."
                if session.cluster is None
                else "The start of more engines was interrupted.",
                next_step="start the engines again: run the same %cluster start line",
                code="WB-CLUSTER-078",
            ) from None
        except BaseException:
            progress.done()
            raise
        progress.done(cluster.status())
        count = len(cluster.worker_ids)
        if asked.count is not None and asked.count < count:
            print(  # noqa: T201
                f"{count} engines are running; to train on fewer engines, use -n in the line with "
                "%%distributed"
            )
        if why := cluster.engine_set.put_off:
            print(  # noqa: T201
                "The engines started more slowly than usual, because Workbench did not import the "
                f"framework in advance: {why}"
            )
        if asked.keep:
            print(kept_words(cluster.keeping))  # noqa: T201

    def _note(self, words: str) -> None:
        """Print a note for the user, only once in this notebook."""
        if words not in self._noted:
            self._noted.add(words)
            print(words)  # noqa: T201

    def _attach(self, asked: ClusterLine) -> None:
        cluster = session.attach(asked.cluster, take=asked.take)
        show(cluster.status())
        run = show_attached(cluster)
        if run is not None:
            self.shell.user_ns["_run"] = run

    @cell_magic
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on the engines, or train it under a strategy. See `%%distributed?`."""
        self._cell(parse_cell_line(line), Recipe(cell, BODY_LINE, self._origin()), cell)

    @line_magic("distributed")  # type: ignore[arg-type]
    def distributed_line(self, line: str) -> None:
        """Train the last cell again, or `--recipe NAME`, under another strategy."""
        asked = parse_cell_line(line, "%distributed")
        if asked.recipe is None:
            self._refuse_body()
        if not asked.strategies:
            raise PlanError(
                "The line names no strategy.",
                allowed=", ".join(catalog.names()),
                next_step="%distributed mirrored",
                code="WB-PLAN-059",
            )
        recipe = session.recipe_named(asked.recipe, asked.framework).with_given(asked.parameters)
        self._cell(asked, recipe, recipe.cell if asked.local else recipe.source)

    @cell_magic
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some engines: `%%rank 0` is short for `%%distributed --ranks 0`."""
        words = strip_comment(line).split(maxsplit=1)
        if not words:
            raise PlanError(
                "%%rank needs at least one rank.",
                allowed="%%rank 0, %%rank 0,2, %%rank 0-2",
                code="WB-PLAN-060",
            )
        asked = parse_cell_line(
            f"--ranks {','.join(map(str, parse_ranks(words[0])))} {' '.join(words[1:])}", "%%rank"
        )
        self._cell(asked, Recipe(cell, BODY_LINE, self._origin()), cell)

    @line_magic
    def panel(self, line: str) -> None:
        """Show the panel: select, run, compare and disturb strategies with the mouse."""
        if rest := strip_comment(line).strip():
            raise PlanError(
                "%panel takes no arguments.", seen=rest, next_step="%panel", code="WB-PLAN-061"
            )
        from .panels.show import panel

        show(panel())

    @line_magic
    def push(self, line: str) -> None:
        """Copy variables of the notebook to the engines: `%push x y [--rank 0,1]`."""
        push_values(session.need_cluster(), line, self.shell.user_ns)

    @line_magic
    def pull(self, line: str) -> None:
        """Copy variables of the engines into the notebook: `%pull loss [--rank 0] [--as l]`."""
        pull_values(session.need_cluster(), line, self.shell.user_ns)

    def _cell(self, asked: RunRequest, recipe: Recipe, cell: str) -> None:
        refuse_launchers(recipe.source)
        if asked.recipe and recipe.source == cell and asked.strategies:
            named = session.recipe_named
            recipe = named(asked.recipe, asked.framework) if not cell.strip() else recipe
        if (asked.to_job or asked.plain) and not chooses(asked):
            self._write_job(asked, recipe)
            return
        number = self._number()
        autoreload = _autoreload(self.shell)
        try:
            if asked.strategies:
                train = train_chosen if chooses(asked) else session.train
                runs = train(asked, recipe, number=number, autoreload=autoreload)
                self.shell.user_ns["_run"] = runs[-1]
                swept = bool(asked.several)
                self._conclude(asked, [run for run in runs if swept or run.error is None])
                if not asked.background and (refused := refusals(runs)) is not None:
                    raise refused
            else:
                session.run_cell(asked, recipe, number=number, autoreload=autoreload)
        except RunError as error:
            latest = registry.runs.latest
            if asked.strategies and latest is not None:
                self.shell.user_ns["_run"] = latest
            raise _explained(error, self.shell.user_ns) from None
        if asked.local:
            result = self.shell.run_cell(cell, store_history=False)
            result.raise_error()

    def _write_job(self, asked: RunRequest, recipe: Recipe) -> None:
        """Write the cell as a job instead of training it."""
        if not asked.to_job or len(asked.strategies) != 1 or asked.seeds:
            raise PlanError(
                "--plain needs a folder for the job."
                if not asked.to_job
                else "A job needs exactly one strategy."
                if len(asked.strategies) != 1
                else "A job is one training, so it cannot have several seeds.",
                seen=f"{', '.join(asked.strategies) or 'no strategy'}"
                + (f", --seeds {asked.seeds}" if asked.seeds else "")
                + ("" if asked.to_job else ", --plain without --to-job"),
                allowed="%%distributed mirrored -n 2 --to-job DIR",
                code="WB-PLAN-201",
            )
        cluster = session.cluster
        plan = plan_of(
            asked, recipe,
            framework=notebook_framework(),
            workers=2 if cluster is None else max(1, len(cluster.worker_ids)),
        )  # fmt: skip
        session.recipe = plan.recipe
        write(job_line(job(plan, asked.to_job, plain=asked.plain)) + "\n")

    def _conclude(self, asked: RunRequest, runs: list[Any]) -> None:
        if asked.background:
            return
        if len(runs) > 1:
            from .notebook.sweep import concluded

            shown = concluded(runs, price=asked.price)
            show(shown.table() if asked.plot in ("text", "off") else shown)
        else:
            show(runs[0].summary())

    def _origin(self) -> str:
        return f"In[{self._number()}]"

    def _number(self) -> int:
        """Return the number of the running cell.

        IPython increases its counter before a cell runs (9.x) or after it (8.x). It stores the
        cell's source before, under the cell's number.
        """
        kept = self.shell.history_manager
        held = 0 if kept is None else len(kept.input_hist_raw) - 1
        return held if held > 0 else int(self.shell.execution_count)

    def _refuse_body(self) -> None:
        """Raise an error if `%distributed` is the first line of a cell with code below it.

        Raises:
            PlanError: The lines below are meant for the engines but would run in the notebook.
        """
        kept = self.shell.history_manager
        raw = str(kept.input_hist_raw[-1]) if kept is not None and kept.input_hist_raw else ""
        first, _, body = raw.lstrip().partition("\n")
        if first.startswith("%distributed") and meant_for_engines(body, self.shell.user_ns):
            raise PlanError(
                "%distributed is a line magic, so the lines below it would run in the notebook and "
                "not on the engines.",
                seen=first,
                allowed="%%distributed above the code that the engines should run",
                next_step=f"%{first}",
                code="WB-PLAN-062",
            )


def refuse_launchers(source: str) -> None:
    """Raise an error if a cell for the engines starts training processes itself.

    Each worker would start workers of its own, which wait for each other forever.

    Raises:
        PlanError: It calls Accelerate's `notebook_launcher`, or has one of Lightning's strategies
            for notebooks.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            words = [w.value.value for w in node.keywords
                     if w.arg == "strategy" and isinstance(w.value, ast.Constant)]  # fmt: skip
            if called in _LAUNCHERS or _FOR_NOTEBOOKS.intersection(map(str, words)):
                one = f"{called}(...)" if called in _LAUNCHERS else f"strategy={words[0]!r}"
                raise PlanError(
                    "The cell starts training processes itself, but the engines already are "
                    "training processes.",
                    seen=one,
                    allowed="a training loop that reads torchrun's environment variables, which "
                    "every engine has",
                    next_step=f"call the function itself: train(), not {called}(train)"
                    if called in _LAUNCHERS
                    else 'write strategy="ddp"',
                    code="WB-PLAN-341",
                )


_LAUNCHERS = frozenset({"notebook_launcher", "debug_launcher"})
_FOR_NOTEBOOKS = frozenset({"ddp_notebook", "ddp_notebook_find_unused_parameters_true", "ddp_fork",
                            "ddp_spawn"})  # fmt: skip


def meant_for_engines(body: str, namespace: dict[str, Any]) -> bool:
    """Whether lines below `%distributed` are code for engines: they train, or use a rank.

    Args:
        namespace: The notebook's namespace, which has a rank only if the user defined one.
    """
    try:
        tree = ast.parse(body)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _ENGINES_ONLY and node.id not in namespace:
            return True
        if isinstance(node, ast.Attribute) and node.attr in _TRAINING:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(name.split(".")[0] in _FRAMEWORKS for name in names):
                return True
    return False


_ENGINES_ONLY = frozenset({"rank", "local_rank", "world_size", "device", "strategy"})
_TRAINING = frozenset({"fit", "prepare", "watch"})
_FRAMEWORKS = frozenset({"torch", "tensorflow", "keras"})


def _explained(error: RunError, namespace: dict[str, Any]) -> RunError:
    """Add advice from the notebook: a name that the engines lack can exist there."""
    outcome = outcome_behind(error)
    if outcome is None or outcome.ename != "NameError":
        return error
    name = outcome.evalue.split("'")[1] if "'" in outcome.evalue else ""
    if name and name in namespace:
        step = f"%push {name}, or define it in a %%distributed cell"
        if isinstance(namespace[name], ModuleType):
            module = namespace[name].__name__
            step = f"write in the cell: import {module}" + f" as {name}" * (module != name)
        here = "The name exists in the notebook, but not on the engines."
        found = RunError(f"{error.what}\n  {here}", seen=name, next_step=step, code="WB-RUN-052")
        if error.brief is not None:
            head = error.brief.partition("\n")[0]
            found.brief, found.shown = f"{head}\n  {here}\n  next:    {step}", error.shown
        return found
    return error


def _autoreload(shell: Any) -> str:
    """Return the notebook's autoreload mode; empty if it is off."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    if reloader is None or not reloader.enabled:
        return ""
    if getattr(reloader, "autoload_obj", False):
        return "3"
    return "2" if reloader.check_all else "1"


def _complete(shell: Any, event: Any) -> list[str]:
    """Complete strategies, options and flags from the catalog."""
    line = event.line
    words = line.split()
    if line.startswith(("%cluster", "cluster")):
        if words[-1 if line.endswith(" ") else -2 :][:1] == ["--launcher"]:
            return known_launchers()
        return [*ACTIONS, *(o for a in cluster_parser()._actions for o in a.option_strings)]
    last = words[-1] if words and not line.endswith(" ") else ""
    previous = words[-2] if len(words) > 1 and last else (words[-1] if words else "")
    if previous in ("-o", "--option"):
        chosen = [e for e in catalog.strategies() if any(e.name in w.split(",") for w in words)]
        options = [f"{o.name}=" for e in chosen or catalog.strategies() for o in e.options]
        return list(dict.fromkeys(options))
    if previous in FLAGS["parameters"].names:
        return [f"{name}=" for name in _parameters_of(words)]
    for flag in FLAGS.values():
        if previous in flag.names and flag.choices:
            return list(flag.choices)
    if previous == "--recipe":
        return recipes.names()
    if previous == "--framework":
        return list(catalog.FRAMEWORKS)
    flags = [o for action in cell_parser()._actions for o in action.option_strings]
    return flags if last.startswith("-") else [*catalog.names(), AUTO, *flags]


def _parameters_of(words: list[str]) -> list[str]:
    """Return the parameters of the recipe in a line, otherwise of the last recipe."""
    named = dict(pairwise(words)).get("--recipe", "")
    found = recipes.get(named) if named else session.recipe
    return [] if found is None else list(found.parameters)


def register(shell: Any) -> None:
    """Register magics and completion with a shell; begin to pre-warm."""
    magics = WorkbenchMagics(shell)
    for name, parser in (("distributed", cell_parser()), ("cluster", cluster_parser())):
        getattr(WorkbenchMagics, name).__doc__ = parser.format_help()
    shell.register_magics(magics)
    limit_completion()
    for command in ("%%distributed", "%distributed", "%%rank", "%cluster"):
        shell.set_hook("complete_command", _complete, str_key=command)
    place = places.here() if in_notebook() else None
    if place is not None:
        print(f"Workbench on {place.name}: {place.note}")  # noqa: T201
    session.prewarm()


def unregister(shell: Any) -> None:
    """Stop the cluster at the end of the cell, unless the cell loads the extension again."""

    def cell_over(*_: object) -> None:
        shell.events.unregister("post_run_cell", cell_over)
        if "workbench" not in shell.extension_manager.loaded:
            session.stop()

    shell.events.register("post_run_cell", cell_over)
