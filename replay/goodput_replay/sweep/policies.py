"""`goodput policies`: every candidate on your own trace, in virtual time."""

from __future__ import annotations

import json
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.errors import ExitCode, InputError, Interrupted, UsageError
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_S, parse_duration
from goodput_engine.manifest_file import read_manifest
from goodput_engine.server.device_choice import choose_device
from goodput_replay.emulation.settings import read_topology
from goodput_replay.sweep.candidates import Candidate, Evaluation, Question, grid
from goodput_replay.sweep.picture import draw
from goodput_replay.sweep.recommendation import as_json, label, recommend, table
from goodput_replay.sweep.workers import evaluate_all
from goodput_traces.sample import sample_path
from goodput_traces.transforms import (
    TransformPlan,
    parse_class_rules,
    parse_factor,
    parse_window,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

__all__ = ["main", "make_parser"]

_MOST: Final = 2000
_WIDEST: Final = 1000
_SAMPLE: Final = "sample"
_FORMATS: Final = (".png", ".svg", ".pdf")
_CONFIDENCE: Final = DEFAULT_CONFIDENCE

_Word = TypeVar("_Word", Policy, Preemption, RouterPolicy)


def main(argv: Sequence[str]) -> int:
    """Compare, and recommend.

    Args:
        argv: the arguments after `goodput policies`.

    Returns:
        0: at least one candidate is PASS; 1: all FAIL; 2: none is PASS, and some may be.

    Raises:
        UsageError: an option, or a combination, that cannot be.
        InputError: the trace, the manifest or a topology cannot be used.
    """
    given = make_parser().parse_args(argv)
    service = read_manifest(given.file)
    candidates = _candidates(service.spec, given)
    if len(candidates) > _MOST:
        raise UsageError(
            f"goodput policies: {len(candidates)} candidates are more than {_MOST}; name fewer "
            "policies, budgets, replicas or placements"
        )
    _check_plot(given.plot)
    _check_device(service, given)
    question = _question(given)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("candidates", total=len(candidates))

            def done(one: Evaluation) -> None:
                progress.update(task, advance=1, description=label(one.candidate))

            evaluations = evaluate_all(question, candidates, jobs=given.jobs, on_done=done)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was compared") from None
    recommendation = recommend(evaluations, service.spec)
    if given.plot is not None:
        try:
            draw(evaluations, recommendation.chosen, given.plot)
        except OSError as error:
            raise InputError(
                f"--plot {given.plot}: cannot be written ({error.strerror}); name another file"
            ) from error
    if given.json:
        sys.stdout.write(json.dumps(as_json(evaluations, recommendation), indent=2) + "\n")
    else:
        # The table has a width of its own: a terminal wraps it, nothing is cut off.
        screen = Console(width=_WIDEST)
        screen.print(table(evaluations))
        screen.print(f"\n{recommendation.sentence}.", highlight=False, soft_wrap=True)
        if recommendation.lines:
            screen.print(f"\n{recommendation.lines}", highlight=False, end="")
    kinds = {one.verdict for one in evaluations}
    if VerdictKind.PASS in kinds:
        return ExitCode.PASS
    return ExitCode.FAIL if kinds == {VerdictKind.FAIL} else ExitCode.INCONCLUSIVE


def _candidates(spec: LLMServiceSpec, given: Any) -> tuple[Candidate, ...]:
    """What is asked for; an option that was left out takes the manifest's value."""
    pools = [file for file in given.topology if read_topology(Path(file)).migration is None]
    return grid(
        policies=given.policies or sorted(Policy),
        budgets=given.budgets or (spec.engine.token_budget.initial,),
        preemptions=given.preemptions or (spec.engine.preemption,),
        replicas=given.replicas or (max(1, spec.initial_replicas),),
        placements=given.placements or (spec.router.policy,),
        pools=pools,
        migrations=[file for file in given.topology if file not in pools],
    )


def _question(given: Any) -> Question:
    try:
        rules = parse_class_rules(given.class_by)
    except ValueError as error:
        raise UsageError(f"goodput policies: --class-by: {error}") from error
    return Question(
        trace=sample_path() if given.trace == _SAMPLE else Path(given.trace),
        manifest=given.file,
        device=given.device,
        transforms=TransformPlan(
            window=given.window,
            rate_scale=given.rate_scale,
            seed=given.seed,
            class_rules=rules,
            limit=given.limit,
        ),
        timeout_ns=given.timeout,
        confidence=_CONFIDENCE,
        seed=given.seed,
    )


def _check_plot(path: Path | None) -> None:
    """A picture that cannot be written is found before, not after, an hour's work."""
    if path is None:
        return
    if path.suffix not in _FORMATS:
        raise UsageError(f"--plot {path}: the name must end in {' or '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: {path.parent} is no folder; make it first")


def _check_device(service: LLMService, given: Any) -> None:
    _, profile = choose_device(service.spec, asked=given.device, source=str(given.file))
    if profile.illustrative and not given.illustrative:
        raise InputError(
            "the device's figures illustrate a publication and fit no device one can buy; add "
            "--illustrative if a choice for it is what you want"
        )


def make_parser() -> CommandParser:
    """Build the parser of `goodput policies`."""
    parser = CommandParser(
        "goodput policies",
        summary="Serve a trace in virtual time with every policy, budget, number of replicas and "
        "placement that is asked for; show who keeps the promises at what cost, and recommend.",
        examples=(
            "goodput policies --trace sample -f examples/chat.yaml",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --replicas 1,2",
            "goodput policies --trace sample -f examples/chat.yaml --budgets 512,2048",
            "goodput policies --trace prod.parquet -f examples/chat.yaml --plot it.png",
            "goodput policies --trace sample -f examples/chat.yaml --policies slo,sarathi --json",
        ),
    )
    add = parser.add_argument
    add("--trace", required=True, help="a trace (Parquet), or `sample`")
    add("-f", "--file", metavar="MANIFEST", type=Path, required=True, help="an LLMService")
    add("--device", metavar="PROFILE", help="emulate this device in place of model.source")
    add(
        "--policies",
        metavar="P,…",
        type=argument_type(_choices(Policy), "policies"),
        help="scheduling policies (default: all)",
    )
    add(
        "--budgets",
        metavar="N,…",
        type=argument_type(_numbers(1, 1_048_576, "a token budget"), "budgets"),
        help="token budgets (default: the manifest's)",
    )
    add(
        "--replicas",
        metavar="N,…",
        type=argument_type(_numbers(1, 1000, "a number of replicas"), "replicas"),
        help="numbers of replicas (default: the manifest's)",
    )
    add(
        "--preemptions",
        metavar="M,…",
        type=argument_type(_choices(Preemption), "preemptions"),
        help="what becomes of preempted requests' blocks (default: the manifest's)",
    )
    add(
        "--placements",
        metavar="P,…",
        type=argument_type(_choices(RouterPolicy), "placements"),
        help="the router's policies (default: the manifest's)",
    )
    add(
        "--topology",
        metavar="FILE",
        action="append",
        default=[],
        help="also with the pools, or the migration, of this file; virtual only; repeatable",
    )
    add(
        "--window",
        metavar="FROM..TO",
        type=argument_type(parse_window, "window"),
        help="the part of the trace, such as 10m..20m",
    )
    add(
        "--rate-scale",
        metavar="FACTOR",
        type=argument_type(parse_factor, "factor"),
        default=Fraction(1),
        help="more or fewer requests, bursts preserved",
    )
    add("--class-by", metavar="RULE", action="append", default=[], help="as for replay; repeatable")
    add(
        "--limit",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 999_999_999, "a limit"), "limit"),
        help="only the first N requests",
    )
    add(
        "--timeout",
        metavar="TIME",
        type=argument_type(parse_duration, "time"),
        default=600 * NS_PER_S,
        help="how long a request may take (default: 10m)",
    )
    add(
        "--seed",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 0, 999_999_999, "a seed"), "seed"),
        default=0,
        help="of what is drawn at random (default: 0)",
    )
    add(
        "--jobs",
        metavar="N",
        type=argument_type(lambda text: parse_whole(text, 1, 256, "a number"), "number"),
        default=os.cpu_count() or 1,
        help="processes (default: one per core)",
    )
    add("--plot", metavar="FILE", type=Path, help="draw the comparison: .png, .svg or .pdf")
    add("--illustrative", action="store_true", help="answer for an illustrative device, too")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _choices(kind: type[_Word]) -> Callable[[str], tuple[_Word, ...]]:
    def parse(text: str) -> tuple[_Word, ...]:
        found = []
        for word in text.split(","):
            match = next((one for one in kind if one == word.strip()), None)
            if match is None:
                known = ", ".join(sorted(kind))
                raise ValueError(f"{word.strip()[:40]!r} is none of {known}")
            found.append(match)
        return tuple(dict.fromkeys(found))

    return parse


def _numbers(low: int, high: int, what: str) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys(parse_whole(word.strip(), low, high, what) for word in text.split(","))
        )

    return parse
