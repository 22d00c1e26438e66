"""`replay ab`: record pairs of runs of two builds, and judge the second against the first.

The replicate is the pair. Pairs come in twos, in the order ABBA or BAAB at random, so that a linear
drift of the machine cancels. Both runs of a pair send the same prompts, and no other run does. The
number of pairs, or the pairs after which the result is looked at, are fixed before the first run.
"""

from __future__ import annotations

import random
import secrets
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from goodput_core.cli import CommandParser, argument_type, parse_whole
from goodput_core.contract import PATH_GATE_STATE
from goodput_core.errors import ExitCode, InputError, Interrupted, UsageError
from goodput_core.files import is_disk_full
from goodput_core.replay_job import ABResult, ABState
from goodput_core.slo.gate import DEFAULT_MARGIN
from goodput_core.slo.pairs import MAX_PAIRS, USUAL_PAIRS
from goodput_core.slo.targets import USUAL_CONFIDENCE, format_objective, parse_objective
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_S, format_duration
from goodput_replay.child import child_replays
from goodput_replay.compare.builds import RECORDED, Build, add_build_options, read_builds
from goodput_replay.compare.gate import GateResult, judge_runs
from goodput_replay.compare.gate_command import (
    add_output_options,
    add_rule_options,
    parse_address,
    require_folders,
    require_outputs,
    write_outputs,
)
from goodput_replay.compare.progress import (
    describe_interval,
    result_message,
    serving_progress,
)
from goodput_replay.compare.recorded_baseline import (
    find_recorded_runs,
    read_recorded_spread,
)
from goodput_replay.compare.recording import (
    AB_FILE,
    ABRecording,
    RecordedPair,
    find_history,
    read_history,
    write_recording,
)
from goodput_replay.result_options import (
    add_result_file,
    add_upload,
    reporting_errors,
    write_comparison,
)
from goodput_replay.runs.summary import Summary, read_summary
from goodput_replay.storage import require_writable, upload_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from fractions import Fraction

    from goodput_core.slo.pairs import RunSpread
    from goodput_replay.child import ChildReplays
    from goodput_replay.compare.runs import LoadedRun

__all__ = ["main", "make_parser", "plan_looks", "plan_orders"]

_PAIRS_BETWEEN_LOOKS: Final = 2
_SET_BY_AB: Final = "is set for each run; remove it"
_REJECTED: Final = {
    "--salt": _SET_BY_AB,
    "--gate": "is what this command does for both builds; remove it",
    "--dry-run": "sends nothing that could be compared; remove it",
    "--force": "cannot be combined with a comparison; name a new folder with --out",
    "--abort-on": "makes a run incomplete, and so the comparison invalid; remove it",
}


def main(argv: Sequence[str]) -> int:
    """Record the pairs, judge them, and return the exit code of the verdict.

    Args:
        argv: the arguments after `replay ab`; those of `replay` are passed on to every run.

    Raises:
        GoodputError: the comparison could not begin, or a replay failed.
    """
    given, arguments = make_parser().parse_known_args(argv)
    for option, problem in _REJECTED.items():
        if any(text == option or text.startswith(f"{option}=") for text in arguments):
            raise UsageError(f"replay ab: {option} {problem}")
    require_folders(given)
    require_outputs(given)
    with reporting_errors(given.result_file, ABResult):
        return _compare(given, arguments)


def _compare(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Record the pairs, judge them, and report the verdict."""
    baseline, candidate = read_builds(given)
    is_recorded = baseline.option == RECORDED
    if given.history is not None:
        find_history(given.history)
    if is_recorded:
        find_recorded_runs(given.recorded, given.recorded_revision)
        given.pairs = 1
    looks = plan_looks(given.pairs, given.max_pairs, virtual=baseline.option == "--emulate")
    margin = DEFAULT_MARGIN if given.margin is None else given.margin
    out: Path = given.out or Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-ab"
    if out.exists():
        raise UsageError(f"--out {out}: exists already; name another folder, or remove it")
    recording = ABRecording(
        baseline=baseline.value,
        candidate=candidate.value,
        same_build=baseline.identity == candidate.identity,
        looks=looks,
        confidence=format_objective(given.confidence or USUAL_CONFIDENCE),
        margin=format_objective(margin),
        recorded=is_recorded,
    )
    read_spread = None if given.history is None else partial(read_history, given.history)
    if is_recorded:
        read_spread = partial(
            read_recorded_spread, given.recorded, revision=given.recorded_revision
        )
    console = Console(stderr=True)
    with (
        child_replays() as children,
        serving_progress(given.progress, looks[0]) as on_state,
    ):
        comparison = _PairRecorder(
            children,
            arguments,
            (baseline, candidate),
            out,
            console,
            recorded_revision=given.recorded_revision,
        )
        comparison.announce(recording)
        if given.upload is not None:
            require_writable(given.upload)
        result = comparison.record(
            recording, margin=margin, read_spread=read_spread, on_state=on_state
        )
        try:  # the verdict is printed before anything that can fail
            write_outputs(result, given)
            console.print(f"recording: {out}", highlight=False, markup=False, soft_wrap=True)
        finally:
            if given.upload is not None:
                upload_folder(out, given.upload)
            write_comparison(given.result_file, result_message(result))
    return result.exit_code


def make_parser() -> CommandParser:
    """Build the parser of `replay ab`."""
    parser = CommandParser(
        "replay ab",
        summary="Replay a trace against two builds in turn, in pairs of runs, and judge the second "
        "build against the first. Other options are those of `replay`, and apply to every run.",
        usage="replay ab --trace TRACE (-f OLD -f NEW | --target OLD --target NEW | "
        "--emulate OLD --emulate NEW | --recorded DIR --target NEW) [OPTION ...]",
        examples=(
            "replay ab --trace prod.parquet -f examples/chat.yaml -f examples/qwen.yaml --pairs 4",
            (
                "replay ab --trace prod.parquet --target http://old:8000 --target http://new:8000 "
                "--slo examples/slo.yaml --yes"
            ),
            "replay ab --trace sample --emulate examples/chat.yaml --emulate examples/four.yaml",
            "replay ab --trace sample -f examples/chat.yaml -f examples/chat.yaml --out history/aa",
        ),
    )
    add_build_options(parser)
    group = parser.add_argument_group("pairs")
    group.add_argument(
        "--pairs",
        metavar="N",
        type=argument_type(_number_of_pairs, "N"),
        help=f"pairs of runs (default: {USUAL_PAIRS}; 1 in virtual time, which has no noise)",
    )
    group.add_argument(
        "--max-pairs",
        metavar="N",
        type=argument_type(_number_of_pairs, "N"),
        help="if the first pairs do not decide, record two more and look again, up to N pairs; "
        "the bounds are wider, so that the probability of an error stays the same",
    )
    add_rule_options(parser)
    add_output_options(parser)
    parser.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for all runs (default: a new one in runs/)",
    )
    add_upload(parser, "the folder of all runs")
    add_result_file(parser)
    parser.add_argument(
        "--progress",
        metavar="HOST:PORT",
        type=argument_type(parse_address, "HOST:PORT"),
        help=f"serve the recorded pairs and the verdict so far as JSON at {PATH_GATE_STATE} until "
        "the end",
    )
    return parser


def plan_looks(pairs: int | None, max_pairs: int | None, *, virtual: bool) -> tuple[int, ...]:
    """Return the numbers of pairs after which the comparison is judged.

    Args:
        pairs: pairs before the first look; None for the default.
        max_pairs: pairs at the last look; None for one look.
        virtual: True in virtual time, where a second pair would repeat the first.

    Raises:
        UsageError: the numbers do not fit together.
    """
    if virtual:
        if (pairs or 1) > 1 or max_pairs is not None:
            raise UsageError(
                "replay ab: runs in virtual time have no noise, so further pairs repeat the "
                "first; remove --pairs and --max-pairs"
            )
        return (1,)
    first = USUAL_PAIRS if pairs is None else pairs
    if max_pairs is None:
        return (first,)
    if max_pairs < first:
        raise UsageError(f"replay ab: --max-pairs {max_pairs} is less than {first} pairs")
    if first < 2:
        raise UsageError("replay ab: --max-pairs needs at least --pairs 2 before the first look")
    return (*range(first, max_pairs, _PAIRS_BETWEEN_LOOKS), max_pairs)


def plan_orders(pairs: int, rng: random.Random) -> list[str]:
    """Return the order of the runs of each pair, AB or BA, in random blocks of two pairs."""
    orders: list[str] = []
    while len(orders) < pairs:
        orders += rng.choice((["AB", "BA"], ["BA", "AB"]))
    return orders[:pairs]


class _PairRecorder:
    """Records pairs of runs into one folder.

    Args:
        children: runs the replays.
        arguments: arguments of `replay` for every run.
        sides: baseline and candidate.
        out: folder of the recording, which must not exist.
        console: console on stderr, for progress.
        recorded_revision: revision that must have served the runs of a recorded baseline; None if
            any may have.
    """

    def __init__(
        self,
        children: ChildReplays,
        arguments: Sequence[str],
        sides: tuple[Build, Build],
        out: Path,
        console: Console,
        *,
        recorded_revision: str | None = None,
    ) -> None:
        self._children = children
        self._arguments = tuple(arguments)
        self._baseline, self._candidate = sides
        self._same_build = self._baseline.identity == self._candidate.identity
        self._out = out
        self._console = console
        self._recorded_revision = recorded_revision
        self._is_recorded = self._baseline.option == RECORDED

    def announce(self, recording: ABRecording) -> None:
        """Check the arguments and the targets of both sides, and print the time of the comparison.

        Raises:
            UsageError: the replay rejected its arguments or a target.
        """
        seconds = 0.0
        promises = []
        for side in (self._candidate,) if self._is_recorded else (self._baseline, self._candidate):
            options = [side.option, side.value, "--dry-run", "--json"]
            if side.option == "--target":  # an error of the second one, before the first run
                options.append("--test-target")
            completed = self._children.run(*self._arguments, *options)
            if completed.returncode != ExitCode.PASS:
                raise self._children.error(completed, f"{side.name}: ")
            plan = msgspec.json.decode(completed.stdout)
            seconds += plan["duration_s"]
            promises.append(plan["promises"])
            if not plan["promises"] and not plan["requests_with_own_targets"]:
                raise UsageError(
                    f"replay ab: the {side.name} has no SLO; give --slo FILE, or a trace with "
                    "targets in its rows"
                )
        if promises[0] != promises[-1]:
            raise UsageError(
                f"replay ab: {self._baseline.value} and {self._candidate.value} have different "
                "SLOs; give both the same classes, targets and objectives"
            )
        if self._candidate.option == "--emulate" or self._is_recorded:
            return
        least, most = (
            format_duration(round(pairs * seconds) * NS_PER_S)
            for pairs in (recording.looks[0], recording.looks[-1])
        )
        upper = "" if least == most else f", and at most {most}"
        first = recording.looks[0]
        pairs = "1 pair of runs takes" if first == 1 else f"{first} pairs of runs take"
        self._console.print(
            f"{pairs} at least {least}{upper}, plus the time to start services",
            highlight=False,
        )

    def record(
        self,
        recording: ABRecording,
        *,
        margin: Fraction,
        read_spread: Callable[[Sequence[LoadedRun]], Mapping[str, RunSpread]] | None,
        on_state: Callable[[ABState], None] | None = None,
    ) -> GateResult:
        """Record pairs until a look decides or the last one is reached.

        Args:
            recording: the plan.
            margin: acceptable loss of attainment.
            read_spread: returns the spread between earlier runs of one build by class, for the
                judged runs; None if it is unknown.
            on_state: receives the progress after each pair; None if it is not shown, so that pairs
                between two looks need not be judged.

        Raises:
            GoodputError: a replay failed.
        """
        orders = plan_orders(recording.looks[-1], random.Random(secrets.randbits(64)))
        if self._is_recorded:
            orders = ["AB"]
        try:
            self._out.mkdir(parents=True)
            write_recording(self._out, recording)
        except OSError as error:
            if is_disk_full(error):
                raise
            why = error.strerror or type(error).__name__
            raise InputError(f"{self._out}: the folder cannot be created ({why})") from error
        result: GateResult | None = None
        for number, order in enumerate(orders, start=1):
            pair, valid = self._record_pair(number, order, len(orders))
            recording = replace(recording, pairs=(*recording.pairs, pair))
            write_recording(self._out, recording)
            if on_state is None and valid and number not in recording.looks:
                continue
            pairs = recording.run_pairs(self._out)
            result = judge_runs(
                pairs,
                margin=margin,
                confidence=recording.confidence_now(parse_objective(recording.confidence)),
                history=read_spread,
            )
            is_look = number in recording.looks
            if on_state is not None:
                on_state(_state_of(result, number, recording.looks))
            if result.verdict is VerdictKind.INVALID or (
                is_look and result.verdict is not VerdictKind.INCONCLUSIVE
            ):
                break
        assert result is not None, "the last pair is a look"
        return result

    def _record_pair(self, number: int, order: str, most: int) -> tuple[RecordedPair, bool]:
        """Record one pair; return it, and True if both runs are valid."""
        pair = RecordedPair(
            order=order,
            salt=secrets.token_hex(8),
            baseline=f"pair-{number}/baseline",
            candidate=f"pair-{number}/candidate",
        )
        valid = True
        # The requests of the candidate select the recording.
        for letter in reversed(order) if self._is_recorded else order:
            side, folder = self._baseline, self._out / pair.baseline
            if letter == "B":
                side, folder = self._candidate, self._out / pair.candidate
            with self._console.status(f"pair {number} of {most}: {side.name} …"):
                if side is self._baseline and self._is_recorded:
                    summary = self._copy_recorded(read_summary(self._out / pair.candidate), folder)
                else:
                    summary = self._run(side, folder, pair.salt)
            self._print_run(number, side, summary)
            valid = valid and summary.validity.valid
        return pair, valid

    def _copy_recorded(self, candidate: Summary, folder: Path) -> Summary:
        """Copy the latest recording of the candidate's requests, and return its summary."""
        recordings = Path(self._baseline.value)
        run = find_recorded_runs(recordings, self._recorded_revision, candidate)[0]
        shutil.copytree(run, folder)
        self._console.print(f"baseline: {run}", highlight=False, markup=False, soft_wrap=True)
        return read_summary(folder)

    def _run(self, side: Build, folder: Path, salt: str) -> Summary:
        options = [side.option, side.value, "--out", str(folder), "--json"]
        if self._is_recorded:
            options += ["--check-recorded", self._baseline.value]
            if self._recorded_revision is not None:
                options += ["--recorded-revision", self._recorded_revision]
        if side.option != "--emulate":
            # The same prompts twice would hit the prefix cache of one server.
            same = self._same_build and side.option == "--target"
            options += ["--salt", f"{salt}-{side.name}" if same else salt]
        completed = self._children.run(*self._arguments, *options)
        if completed.returncode not in (ExitCode.PASS, ExitCode.INVALID):
            raise self._children.error(completed, f"{side.name}: ")
        if self._children.interrupted:
            raise Interrupted(f"interrupted; {self._out / AB_FILE} lists the complete pairs")
        return read_summary(folder)

    def _print_run(self, number: int, side: Build, summary: Summary) -> None:
        overall = summary.overall
        share = f"{overall.good:,} of {overall.total:,} requests met their targets"
        if not summary.validity.valid:
            share = f"INVALID, {summary.validity.sentence}"
        self._console.print(
            f"pair {number}, {side.name}: {share}", highlight=False, markup=False, soft_wrap=True
        )


def _state_of(result: GateResult, recorded: int, looks: Sequence[int]) -> ABState:
    undecided = result.verdict is VerdictKind.INCONCLUSIVE
    return ABState(
        pairs=recorded,
        planned=next((look for look in looks if look >= recorded + undecided), looks[-1]),
        verdict=result.verdict,
        reason=result.reason.value,
        interval=describe_interval(result),
    )


def _number_of_pairs(text: str) -> int:
    return parse_whole(text, 1, MAX_PAIRS, "a number of pairs")
