"""Cost and attainment of control laws over days of traffic, in virtual time.

The days (`stretched_day.py`) are served by a fleet of small devices. Our laws are compared with two
fixed fleets, for the peak and for the mean, with an HPA on requests in flight, and with the laws of
Dynamo's planner and of llm-d's saturation analyzer. All runs have the same requests, engines (with
their token-budget law) and placement, and start with the fleet for the mean. Only the replica law
differs; ours also changes the bounds of the token budget.

Each of the other laws runs with several values of its target. A law's results are points in the
plane of minutes below an objective and GPU-hours; the lines between neighbouring points that no
other point beats are its curve. Our law has no target except the objectives of the manifest, so it
is one point, which must lie below each curve. At the end, our law runs under constant load, where
any change after the start is a failure.

    python -m benchmarks.control --trace azure.parquet --plot control.png
    python -m benchmarks.control --trace azure.parquet --stretch 6 --copies 4  # a quarter of it
    python -m benchmarks.control --quick  # a part of an hour, a few laws
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.scaling.autoscalers import (
    DynamoState,
    HpaParams,
    HpaState,
    LlmdState,
    dynamo_law,
    hpa_law,
    llmd_law,
)
from benchmarks.scaling.control_view import (
    COLOURS,
    HOUR_S,
    ClassAttainment,
    LawResult,
    constant_table,
    draw,
    gpu_hours_at,
    table,
)
from benchmarks.scaling.stretched_day import DAYS, Day

from goodput_core.control import Bounds, DeviceCapacity, ServiceDecision, service_law
from goodput_core.control.capacity import replica_capacity
from goodput_core.histogram import LengthMix
from goodput_core.slo.judging import JudgementKind, judge, targets_for
from goodput_core.units import NS_PER_S
from goodput_replay.emulation.control import ControlLoop
from goodput_replay.emulation.emulate import emulate
from goodput_replay.statistics.evidence import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from goodput_core.control import ServiceObservation, ServiceParams, ServiceState
    from goodput_core.control.step import Law
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

WINDOW_S: Final = 300
"""Length of the windows that count as below or above an objective."""
BUSY: Final = 0.8
"""Utilisation for which a fixed fleet is sized."""
SETTLING_S: Final = 1200
"""Start of the period in which changes under constant load are counted."""
CONSTANT: Final = (0.6, 1.0, 1.4)
TARGETS: Final[dict[str, tuple[float, ...]]] = {
    "hpa": (10, 15, 20, 30),
    "dynamo": (0.4, 0.6, 0.8, 1.0),
    "llm-d": (0.5, 0.65, 0.8, 0.9),
}
"""Values of each law's target: requests in flight per pod, the share of the latency targets for
which the planner plans, and the share of the KV memory that saturates a replica."""
DEFAULT_TARGETS: Final = {"hpa": 20.0, "dynamo": 1.0, "llm-d": 0.8}
S = TypeVar("S")


# --- the laws -------------------------------------------------------------------------------------
def replicas_alone(
    law: Callable[[S, ServiceObservation, ServiceParams, int], tuple[S, int]], state: S
) -> Law:
    """Return a law with another replica law and the initial token budget."""

    def decide(
        ours: ServiceState, observation: ServiceObservation, params: ServiceParams, now_ns: int
    ) -> tuple[ServiceState, ServiceDecision]:
        nonlocal state
        state, replicas = law(state, observation, params, now_ns)
        return ours, ServiceDecision(
            apply_bounds=Bounds.initial(params),
            apply_replicas=replicas,
            bounds=None,
            replicas=None,
            observation=observation,
            params=params,
            at_ns=now_ns,
        )

    return decide


def law_of(name: str, target: float | None) -> tuple[Law, int]:
    """Return a law and the seconds between its decisions, as in its documentation."""
    if name == "ours":
        return service_law, 10
    assert target is not None, name
    if name == "hpa":
        return replicas_alone(partial(hpa_law, hpa=HpaParams(target=target)), HpaState()), 15
    if name == "dynamo":
        return replicas_alone(partial(planned_for, share=target), DynamoState()), 5
    assert name == "llm-d", name
    return replicas_alone(partial(llmd_law, kv_threshold=target), LlmdState()), 15


def planned_for(
    state: DynamoState,
    observation: ServiceObservation,
    params: ServiceParams,
    now_ns: int,
    *,
    share: float,
) -> tuple[DynamoState, int]:
    """Run Dynamo's law with latency targets that are a share of the manifest's."""
    classes = tuple(
        replace(c, ttft_ms=round(c.ttft_ms * share), tpot_ms=round(c.tpot_ms * share))
        for c in params.classes
    )
    return dynamo_law(state, observation, replace(params, classes=classes), now_ns)


def sizes(settings: FleetSettings, requests: Sequence[PlannedRequest]) -> dict[str, int]:
    """Return fleet sizes for the mean load and for the busiest five minutes, with hindsight.

    The capacity of a replica is the prediction of our law, at a utilisation of 80 %.
    """
    assert settings.control is not None
    profile, params = settings.profile, settings.control.params
    one = replica_capacity(
        DeviceCapacity(form=profile.form, kv_tokens=profile.kv_blocks * profile.block_size),
        LengthMix.of_requests((r.prompt.input_tokens, 0, r.output_tokens) for r in requests),
        tpot_ns=params.tightest_tpot_ns * Bounds.initial(params).safety_percent // 100,
        max_num_seqs=params.max_num_seqs,
        max_tokens=params.initial_tokens,
    )
    assert one is not None
    seconds = np.array([r.scheduled_ns for r in requests]) / NS_PER_S
    busiest = np.bincount((seconds // WINDOW_S).astype(np.int64)).max() / WINDOW_S
    mean = len(requests) / seconds[-1]
    return {
        name: math.ceil(rate * one.device_s / BUSY)
        for name, rate in (("fixed-peak", busiest), ("fixed-mean", mean))
    }


# --- a day ----------------------------------------------------------------------------------------
def serve(
    name: str,
    settings: FleetSettings,
    requests: Sequence[PlannedRequest],
    target: float | None = None,
) -> LawResult:
    """Serve all requests under one law; the fleet starts with the settings' replicas."""
    rules = settings.control
    assert rules is not None
    records: list[RequestRecord] = []
    changes = [(0.0, settings.replicas)]

    def decided(decision: ServiceDecision) -> None:
        if decision.apply_replicas != changes[-1][1]:
            changes.append((decision.at_ns / NS_PER_S, decision.apply_replicas))

    loops: list[ControlLoop] = []
    if not name.startswith("fixed"):
        law, seconds = law_of(name, target)
        interval_ns = seconds * NS_PER_S
        loops = [ControlLoop(rules.params, interval_ns=interval_ns, decided=decided, law=law)]

    def ended(planned: PlannedRequest, record: RequestRecord) -> None:
        for loop in loops:
            loop.ended(planned, record)
        records.append(replace(record, gaps_us=()))  # no class of this service has a TBT target

    outcome = emulate(iter(requests), settings, ended, actors=loops)
    moves = [after - before for (_, before), (_, after) in pairwise(changes)]
    classes, below_h = judged(settings, records, requests[-1].scheduled_ns)
    return LawResult(
        law=name,
        target=target,
        device_h=outcome.replica_ns * settings.profile.devices / NS_PER_S / HOUR_S,
        peak=max(replicas for _, replicas in changes),
        mean=outcome.replica_ns / outcome.end_ns,
        final=outcome.final_replicas,
        ups=sum(move > 0 for move in moves),
        downs=sum(move < 0 for move in moves),
        below_h=below_h,
        classes=classes,
        outcomes=dict(sorted(Counter(str(r.outcome) for r in records).items())),
        changes=changes,
    )


def judged(
    settings: FleetSettings, records: list[RequestRecord], last_ns: int
) -> tuple[dict[str, ClassAttainment], float]:
    """Return the attainment of each class, and the hours with any objective missed."""
    slo = settings.slo
    evidence = gather(records, classes=slo.classes, window_ns=last_ns + 1)
    classes = slo.by_name()
    windows = last_ns // (WINDOW_S * NS_PER_S) + 1
    good, total = ({name: np.zeros(windows, dtype=np.int64) for name in classes} for _ in range(2))
    for record in records:
        kind = judge(record, targets_for(record, classes)).kind
        window = record.scheduled_ns // (WINDOW_S * NS_PER_S)
        good[record.slo_class][window] += kind is JudgementKind.ATTAINED
        total[record.slo_class][window] += kind in (JudgementKind.ATTAINED, JudgementKind.MISSED)
    results: dict[str, ClassAttainment] = {}
    any_below = np.zeros(windows, dtype=np.bool_)
    for one in evidence.classes:
        assert one.interval is not None
        assert one.objective is not None
        below = good[one.name] < float(one.objective) * total[one.name]
        any_below |= below
        results[one.name] = ClassAttainment(
            good=one.attainment.good,
            total=one.attainment.total,
            lower=one.interval.lower,
            upper=one.interval.upper,
            objective=float(one.objective),
            below_h=float(below.sum()) * WINDOW_S / HOUR_S,
        )
    return results, float(any_below.sum()) * WINDOW_S / HOUR_S


def changes_at_constant_load(day: Day, rate: float, length_s: int) -> dict[str, float]:
    """Count the decisions of our law under constant load, and its changes."""
    requests = day.constant(rate, length_s)
    settings = day.settings
    settings = replace(settings, replicas=sizes(settings, requests)["fixed-mean"])
    rules = settings.control
    assert rules is not None
    decisions: list[ServiceDecision] = []
    loop = ControlLoop(rules.params, interval_ns=rules.interval_ns, decided=decisions.append)
    emulate(iter(requests), settings, loop.ended, actors=[loop])
    settled = [d for d in decisions if d.at_ns >= SETTLING_S * NS_PER_S]
    return {
        "rate": rate,
        "replicas": decisions[-1].apply_replicas,
        "decisions": len(settled),
        "changes_of_replicas": _changes([d.apply_replicas for d in settled]),
        "changes_of_bounds": _changes([d.apply_bounds for d in settled]),
    }


def _changes(values: Sequence[object]) -> int:
    return sum(before != after for before, after in pairwise(values))


# --- command --------------------------------------------------------------------------------------
Run = tuple[str, float | None]
"""A law and its target; None if the law has none."""


def runs_of(laws: Sequence[str], *, quick: bool) -> list[Run]:
    """Return the runs of these laws."""
    found: list[Run] = []
    for name in laws:
        targets = (DEFAULT_TARGETS[name],) if quick and name in TARGETS else TARGETS.get(name)
        found += [(name, target) for target in targets] if targets else [(name, None)]
    return found


def run_day(
    day: Day, runs: Sequence[Run], *, jobs: int, results: Path | None
) -> tuple[list[PlannedRequest], list[LawResult]]:
    """Serve one day under each law; runs that `results` contains are not repeated."""
    requests, settings = day.requests(), day.settings
    known = {} if results is None else stored_results(results, day)
    sized = sizes(settings, requests)

    def start(pool: ProcessPoolExecutor, run: Run) -> Future[LawResult]:
        name, target = run
        fleet = replace(settings, replicas=sized.get(name, sized["fixed-mean"]))
        return pool.submit(serve, name, fleet, requests, target)

    # Processes are forked, so that the day is built only once.
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("fork")) as pool:
        pending = {start(pool, run): run for run in runs if run not in known}
        for done in as_completed(pending):
            known[pending[done]] = done.result()
            if results is not None:
                line = {"day": day_key(day), "result": asdict(done.result())}
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return requests, [known[run] for run in runs]


def day_key(day: Day) -> list[object]:
    """Return the values that identify a day in a file of results."""
    return [day.shape, Path(day.trace).name, day.stretch, day.copies, day.startup_s, day.seed]


def stored_results(path: Path, day: Day) -> dict[Run, LawResult]:
    """Return the results of a day that a file contains."""
    found: dict[Run, LawResult] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        if line["day"] == day_key(day):
            result = LawResult(**line["result"])
            classes = {k: ClassAttainment(**v) for k, v in line["result"]["classes"].items()}
            found[result.law, result.target] = replace(result, classes=classes)
    return found


def above_curves(results: Sequence[LawResult]) -> list[str]:
    """Return the laws whose curve our law does not lie below."""
    above: list[str] = []
    for ours in (r for r in results if r.law == "ours"):
        for name in TARGETS:
            points = [(r.below_h, r.device_h) for r in results if r.law == name]
            hours = gpu_hours_at(points, ours.below_h)
            if hours is not None and ours.device_h >= hours:
                above.append(name)
    return above


def main(argv: Sequence[str] | None = None) -> int:
    """Run every law over every day, then ours under constant load.

    Returns:
        1 if our law lies above another law's curve on a day, or changed anything under constant
        load; otherwise 0.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default="sample", help="a Parquet trace (default: %(default)s)")
    parser.add_argument(
        "--stretch", type=positive_count, default=24, help="factor of the length (%(default)s)"
    )
    parser.add_argument(
        "--copies", type=positive_count, default=16, help="copies of each request (%(default)s)"
    )
    parser.add_argument(
        "--startup-seconds", type=float, help="start-up time of a replica (default: the device's)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the arrivals (default: %(default)s)"
    )
    for name, known in (("--days", DAYS), ("--laws", COLOURS)):
        parser.add_argument(
            name,
            type=names_of(known),
            default=",".join(known),
            help="comma-separated (%(default)s)",
        )
    parser.add_argument(
        "--jobs", type=positive_count, default=2, help="processes (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, help="file of results, to continue a stopped run")
    parser.add_argument("--plot", type=Path, help="PNG to draw the first of the days into")
    parser.add_argument("--no-constant", action="store_true", help="omit the constant load")
    parser.add_argument("--quick", action="store_true", help="a short day of the sample trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    if options.quick:
        options.trace, options.stretch, options.copies = "sample", 15, 15
        options.laws, options.days = ["fixed-mean", "hpa", "ours"], ["documented"]
    runs = runs_of(options.laws, quick=options.quick)
    days = [
        Day(
            trace=options.trace,
            stretch=options.stretch,
            copies=options.copies,
            shape=shape,
            startup_s=options.startup_seconds,
            seed=options.seed,
        )
        for shape in options.days
    ]
    failed = False
    printed: dict[str, object] = {}
    for day in days:
        requests, results = run_day(day, runs, jobs=options.jobs, results=options.results)
        if options.plot is not None and day is days[0]:
            shown = {**dict.fromkeys(options.laws), **DEFAULT_TARGETS}
            draw(requests, [r for r in results if r.target == shown[r.law]], options.plot)
        printed[day.shape] = [asdict(r) for r in results]
        if not options.json:
            hours = requests[-1].scheduled_ns / NS_PER_S / HOUR_S
            print(f"\n== {day.shape}: {len(requests):,} requests in {hours:.1f} h")
            table(results)
        # A curve needs more than one point.
        above = [] if options.quick else above_curves(results)
        failed |= bool(above)
        for name in above:
            print(f"{day.shape}: ours lies above the curve of {name}", file=sys.stderr)
    if not options.no_constant:
        constants = constant_loads(days[0], options.jobs, quick=options.quick)
        printed["constant_load"] = constants
        failed |= any(c["changes_of_replicas"] or c["changes_of_bounds"] for c in constants)
        if not options.json:
            constant_table(constants)
    if options.json:
        print(json.dumps(printed))
    return int(failed)


def constant_loads(day: Day, jobs: int, *, quick: bool) -> list[dict[str, float]]:
    """Run our law under constant load: multiples of the mean rate of the documented day."""
    day = replace(day, shape="documented")
    requests = day.requests()
    rate = len(requests) * NS_PER_S / requests[-1].scheduled_ns
    length_s = round((0.5 if quick else 2) * HOUR_S)
    levels = CONSTANT[1:2] if quick else CONSTANT
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("fork")) as pool:
        steady = [
            pool.submit(changes_at_constant_load, day, level * rate, length_s) for level in levels
        ]
        return [run.result() for run in steady]


if __name__ == "__main__":
    sys.exit(main())
