"""Evaluate every candidate of `goodput policies` in worker processes, and print the result."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from goodput_core.errors import (
    ExitCode,
    InputError,
    InternalError,
    Interrupted,
    UsageError,
    install_hint,
)
from goodput_core.signals import defer_signals
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import Policy
from goodput_core.text import printable
from goodput_engine.device.choice import budget_problem, choose_device
from goodput_engine.manifest_file import read_manifest
from goodput_replay.emulation.settings import read_topology
from goodput_replay.runs.tables import choose_table, open_console
from goodput_replay.sweep.candidates import Candidate, Evaluation, SweepInput, evaluate, grid
from goodput_replay.sweep.recommendation import as_json, label, recommend, tables
from goodput_traces.sample import trace_path
from goodput_traces.transforms import TransformPlan, parse_class_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

__all__ = ["compare", "evaluate_all"]

_MAX_CANDIDATES: Final = 2000
_PLOT_FORMATS: Final = (".png", ".svg", ".pdf")


def compare(arguments: Any) -> int:
    """Evaluate all candidates and recommend one.

    Args:
        arguments: the parsed arguments of `goodput policies`.

    Returns:
        0 if at least one candidate has the verdict PASS, 1 if all have FAIL, otherwise 2.

    Raises:
        UsageError: an option, or a combination of options, is invalid.
        InputError: the trace, the manifest or a topology cannot be used.
        Interrupted: a signal was received.
    """
    service = read_manifest(arguments.file)
    candidates = _candidates(service.spec, arguments)
    if len(candidates) > _MAX_CANDIDATES:
        raise UsageError(
            f"goodput policies: {len(candidates)} candidates are more than {_MAX_CANDIDATES}; give "
            "fewer values of --policies, --budgets, --replicas, --preemptions, --placements or "
            "--topology"
        )
    _check_plot(arguments.plot)
    _check_device(service, arguments)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("candidates", total=len(candidates))

            def advance(evaluation: Evaluation) -> None:
                progress.update(
                    task, advance=1, description=escape(printable(label(evaluation.candidate)))
                )

            evaluations = evaluate_all(
                _sweep_input(arguments), candidates, jobs=arguments.jobs, on_done=advance
            )
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was compared") from None
    recommendation = recommend(evaluations, service.spec)
    if arguments.plot is not None:
        _plot(evaluations, recommendation.chosen, arguments.plot, arguments.sessions)
    if arguments.json:
        result = {"sessions": arguments.sessions, **as_json(evaluations, recommendation)}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        screen = open_console()
        if arguments.sessions == "causal":
            screen.print("causal sessions", highlight=False)
        screen.print(choose_table(tables(evaluations), screen))
        sentence = printable(f"{recommendation.sentence}.")
        screen.print(f"\n{sentence}", highlight=False, markup=False)
        if recommendation.lines:
            screen.print(f"\n{recommendation.lines}", highlight=False, end="")
    kinds = {evaluation.verdict for evaluation in evaluations}
    if VerdictKind.PASS in kinds:
        return ExitCode.PASS
    return ExitCode.FAIL if kinds == {VerdictKind.FAIL} else ExitCode.INCONCLUSIVE


def evaluate_all(
    sweep: SweepInput,
    candidates: Sequence[Candidate],
    *,
    jobs: int,
    on_done: Callable[[Evaluation], None],
) -> list[Evaluation]:
    """Evaluate every candidate, and return the evaluations in the order of the candidates.

    Args:
        sweep: trace, manifest and options of all candidates.
        candidates: at least one.
        jobs: number of worker processes; with 1, candidates are evaluated in this process.
        on_done: called with each evaluation as it completes.

    Raises:
        GoodputError: a candidate cannot be evaluated; the others are cancelled.
        KeyboardInterrupt: after Ctrl-C or a hang-up, when all workers have been terminated.
    """
    if jobs == 1:
        evaluations = []
        for candidate in candidates:
            evaluations.append(evaluate(sweep, candidate))
            on_done(evaluations[-1])
        return evaluations
    # Workers are spawned, so that they share no state with this process.
    context = multiprocessing.get_context("spawn")
    # The resource tracker of multiprocessing starts with the pool, and handles SIGINT itself.
    with defer_signals(signal.SIGHUP):
        pool = ProcessPoolExecutor(
            max_workers=min(jobs, len(candidates)), mp_context=context, initializer=_watch_parent
        )
    try:
        # Ctrl-C and a hang-up reach all processes of the terminal; only this one handles them.
        with defer_signals(signal.SIGINT, signal.SIGHUP):
            futures = [pool.submit(evaluate, sweep, candidate) for candidate in candidates]
        _collect(futures, on_done)
        return [future.result() for future in futures]
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(futures: list[Future[Evaluation]], on_done: Callable[[Evaluation], None]) -> None:
    for future in as_completed(futures):
        error = future.exception()
        if isinstance(error, OSError | RuntimeError):
            raise InternalError(f"a worker process ended: {error}") from error
        on_done(future.result())


def _watch_parent() -> None:
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()


def _end_with_parent() -> None:
    # A worker holds both ends of its work pipe, so the pipe does not close when the parent ends.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(ExitCode.INTERRUPTED)


def _candidates(spec: LLMServiceSpec, arguments: Any) -> tuple[Candidate, ...]:
    """Return every combination; the manifest's value replaces a missing option."""
    topologies = arguments.topology
    pools = [file for file in topologies if read_topology(Path(file)).migration is None]
    return grid(
        policies=arguments.policies or sorted(Policy),
        budgets=arguments.budgets or (spec.engine.token_budget.initial,),
        preemptions=arguments.preemptions or (spec.engine.preemption,),
        replicas=arguments.replicas or (max(1, spec.initial_replicas),),
        placements=arguments.placements or (spec.router.policy,),
        pools=pools,
        migrations=[file for file in topologies if file not in pools],
    )


def _sweep_input(arguments: Any) -> SweepInput:
    try:
        rules = parse_class_rules(arguments.class_by)
    except ValueError as error:
        raise UsageError(f"goodput policies: --class-by: {error}") from error
    return SweepInput(
        trace=trace_path(arguments.trace),
        max_decoded_bytes=arguments.max_decoded_size,
        manifest=arguments.file,
        device=arguments.device,
        transforms=TransformPlan(
            session_arrivals=arguments.session_arrivals,
            window=arguments.window,
            rate_scale=arguments.rate_scale,
            seed=arguments.seed,
            class_rules=rules,
            limit=arguments.limit,
        ),
        timeout_ns=arguments.timeout,
        seed=arguments.seed,
        causal=arguments.sessions == "causal",
    )


def _check_plot(path: Path | None) -> None:
    """Reject a picture that cannot be drawn or written, before the candidates are evaluated."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot {path}: the package 'matplotlib' is not installed; {install_hint('plot')}"
        )
    if path.suffix not in _PLOT_FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(_PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: {path.parent} is not a folder; create it first")


def _plot(evaluations: Sequence[Evaluation], chosen: Evaluation, path: Path, sessions: str) -> None:
    from goodput_replay.sweep.picture import draw  # noqa: PLC0415 - matplotlib

    try:
        draw(evaluations, chosen, path, title="causal sessions" if sessions == "causal" else "")
    except OSError as error:
        raise InputError(
            f"--plot {path}: cannot be written ({error.strerror}); name another file"
        ) from error


def _check_device(service: LLMService, arguments: Any) -> None:
    _, profile = choose_device(service.spec, device=arguments.device, source=str(arguments.file))
    if profile.illustrative and not arguments.illustrative:
        raise InputError(
            "the device profile is illustrative: its figures fit no device on the market; add "
            "--illustrative to compare candidates on it anyway"
        )
    for budget in arguments.budgets or ():
        problem = budget_problem(budget, profile)
        if problem is not None:
            raise UsageError(f"goodput policies: --budgets: {problem}")
