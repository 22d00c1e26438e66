"""Cells of the comparison of policies: a load on a fleet, and the kept promises of one run.

A run takes the product's own path: the emulated fleet in virtual time, with the router's placement,
and the house's judgement of each record. A run ends when no unfinished request can meet its targets
any more: the clients of these requests then leave.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, TypeVar

from benchmarks.comparison.admitted import Admitted, PredictingSloPolicy, is_ensurable
from benchmarks.comparison.loads import Load, OfferedRequest, offered

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.workloads import EngineSpec, TokenBudgetSpec
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import configuration
from goodput_engine.device.load import load_profile
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import FleetSettings
from goodput_replay.plan import PlannedRequest, PromptKey
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.device.profile import DeviceProfile

__all__ = [
    "Cell",
    "Fleet",
    "Kept",
    "fleet_settings",
    "planned_requests",
    "run_cell",
    "slo_classes",
]

_N = TypeVar("_N", int, float)
_REFUSED: Final = (Outcome.SHED, Outcome.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas of one device.

    Args:
        device: name or path of a device profile.
        kv_blocks: KV blocks of a replica; None for the profile's.
        swap_gb_per_s: bandwidth between device and host memory; None for the profile's.
        max_num_seqs: slots of a replica.
        token_budget: initial token budget of a step. As by default, the law `model` sizes the
            prompt tokens of a step for the policies that use it.
        swap_gib: host memory for the KV blocks of preempted requests.
        replicas: number of replicas.
        placement: placement policy of the router.
        max_waiting: number of requests that may wait on a replica.
    """

    device: str = "llama-3-8b-h100"
    kv_blocks: int | None = None
    swap_gb_per_s: float | None = None
    max_num_seqs: int = 256
    token_budget: int = 2048
    swap_gib: int = 16
    replicas: int = 1
    placement: RouterPolicy = RouterPolicy.PREFIX_AFFINITY
    max_waiting: int = 1024

    def profile(self) -> DeviceProfile:
        """Return the profile of every replica."""
        profile = _profile(self.device)
        if self.kv_blocks is not None:
            profile = replace(profile, kv_blocks=self.kv_blocks)
        if self.swap_gb_per_s is not None:
            profile = replace(profile, swap_bytes_per_s=round(self.swap_gb_per_s * 1e9))
        return profile


@lru_cache
def _profile(device: str) -> DeviceProfile:
    return load_profile(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A load on a fleet.

    Args:
        name: unique name.
        load: the load.
        fleet: the fleet.
        factor: rate in multiples of the knee; None if the cell has a fixed rate.
        preemption: preemption mode of every replica.
        timeout_s: time after which a client gives up.
    """

    name: str
    load: Load
    fleet: Fleet
    factor: float | None = None
    preemption: Preemption = Preemption.HYBRID
    timeout_s: float = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Kept promises of one run.

    Args:
        offered, kept: numbers of requests, and of those that met all their targets.
        offered_weight, kept_weight: the same, weighted.
        levels: offered and kept weight of each priority level.
        classes: offered and kept requests of each class.
        admitted: requests that were not refused. A kept request is one of them.
        admitted_parts: the admitted requests of `slo`, counted apart where their targets can be
            ensured; empty for other policies.
        refused: requests refused at once or later, or too long for the device.
        preemptions: preemptions on all replicas.
        end_ns: end of the last request.
        cpu_s: CPU time of the run.
    """

    offered: int
    kept: int
    offered_weight: float
    kept_weight: float
    levels: Mapping[int, tuple[float, float]]
    classes: Mapping[str, tuple[int, int]]
    admitted: int
    admitted_parts: Admitted
    refused: int
    preemptions: int
    end_ns: int
    cpu_s: float

    @property
    def share(self) -> float:
        """Kept share of the offered weight."""
        return self.kept_weight / self.offered_weight if self.offered_weight else 1.0

    def plus(self, other: Kept) -> Kept:
        """Add the requests of another run; the end is that of the later run."""
        return Kept(
            offered=self.offered + other.offered,
            kept=self.kept + other.kept,
            offered_weight=self.offered_weight + other.offered_weight,
            kept_weight=self.kept_weight + other.kept_weight,
            levels={
                level: _sum(self.levels.get(level), other.levels.get(level))
                for level in sorted({*self.levels, *other.levels}, reverse=True)
            },
            classes={
                name: _sum(self.classes.get(name), other.classes.get(name))
                for name in (*self.classes, *(other.classes.keys() - self.classes.keys()))
            },
            admitted=self.admitted + other.admitted,
            admitted_parts=self.admitted_parts.plus(other.admitted_parts),
            refused=self.refused + other.refused,
            preemptions=self.preemptions + other.preemptions,
            end_ns=max(self.end_ns, other.end_ns),
            cpu_s=self.cpu_s + other.cpu_s,
        )


def _sum(one: tuple[_N, _N] | None, other: tuple[_N, _N] | None) -> tuple[_N, _N]:
    """Add offered and kept requests, or their weights; None for none."""
    if one is None or other is None:
        both = one or other
        assert both is not None
        return both
    return one[0] + other[0], one[1] + other[1]


def run_cell(
    cell: Cell,
    policy: str = Policy.SLO,
    seed: int = 1,
    preemption: str | None = None,
    *,
    requests: Sequence[OfferedRequest] | None = None,
) -> Kept:
    """Serve a cell once and return the kept promises.

    Args:
        cell: the cell.
        policy: name of the policy of every replica.
        seed: seed of the load and of the router.
        preemption: preemption mode in place of that of the cell; None for that of the cell.
        requests: requests to serve in place of those of the cell; None for those of the cell.
    """
    mode = cell.preemption if preemption is None else preemption
    requests = offered(cell.load, seed) if requests is None else requests
    by_id = {f"{seed}-{number}": request for number, request in enumerate(requests)}
    profile = cell.fleet.profile()
    unsure = {
        name
        for name, request in by_id.items()
        if not is_ensurable(
            profile,
            prompt_tokens=request.prompt_tokens,
            output_limit=request.max_tokens,
            e2e_ns=request.targets.e2e_ns,
        )
    }
    offered_levels: defaultdict[int, float] = defaultdict(float)
    kept_levels: defaultdict[int, float] = defaultdict(float)
    offered_classes: Counter[str] = Counter()
    kept_classes: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    others: Counter[bool] = Counter()
    chances: dict[int, float] = {}

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        request = by_id[planned.request_id]
        met = judge(record, request.targets).kind is JudgementKind.ATTAINED
        outcomes[record.outcome] += 1
        if planned.request_id in unsure and record.outcome not in _REFUSED:
            others[met] += 1
        offered_levels[request.priority] += request.weight
        offered_classes[request.slo_class] += 1
        if met:
            kept_levels[request.priority] += request.weight
            kept_classes[request.slo_class] += 1

    started = time.process_time()
    settings = fleet_settings(cell, policy, seed, mode, slo=slo_classes(requests))
    if policy == Policy.SLO and unsure:
        settings = replace(
            settings,
            build_policy=partial(
                PredictingSloPolicy,
                chances,
                lambda request: (
                    not is_ensurable(
                        profile,
                        prompt_tokens=request.input_tokens,
                        output_limit=request.max_output_tokens,
                        e2e_ns=request.targets.e2e_ns,
                    )
                ),
            ),
        )
    totals = emulate(iter(planned_requests(by_id)), settings, on_record)
    kept = sum(kept_classes.values())
    refused = sum(outcomes[outcome] for outcome in _REFUSED)
    admitted, num_others = len(requests) - refused, others.total()
    return Kept(
        offered=len(requests),
        kept=kept,
        offered_weight=sum(offered_levels.values()),
        kept_weight=sum(kept_levels.values()),
        levels={
            level: (offered_levels[level], kept_levels[level])
            for level in sorted(offered_levels, reverse=True)
        },
        classes={name: (offered_classes[name], kept_classes[name]) for name in offered_classes},
        admitted=admitted,
        admitted_parts=Admitted(
            sure=admitted - num_others,
            sure_kept=kept - others[True],
            others=num_others,
            others_kept=others[True],
            predicted=math.fsum(chances.values()),
        )
        if policy == Policy.SLO
        else Admitted(),
        refused=refused,
        preemptions=totals.preemptions,
        end_ns=totals.end_ns,
        cpu_s=time.process_time() - started,
    )


def planned_requests(requests: Mapping[str, OfferedRequest]) -> list[PlannedRequest]:
    """Return offered requests, by id, as the fleet receives them.

    All of them are cancelled when the slack of the last one has passed. Unfinished requests have
    missed their targets by then, and to serve them would only take time.
    """
    slacks_ns = [request.slack_ns for request in requests.values()]
    ends_ns = [
        request.arrival_ns + slack_ns
        for request, slack_ns in zip(requests.values(), slacks_ns, strict=True)
        if slack_ns is not None
    ]
    end_ns = max(ends_ns) + 1 if len(ends_ns) == len(requests) > 0 else None
    return [
        PlannedRequest(
            request_id=name,
            scheduled_ns=request.arrival_ns,
            slo_class=request.slo_class,
            targets=request.targets,
            priority=request.priority,
            prompt=PromptKey(
                request_id=name,
                input_tokens=request.prompt_tokens,
                hashes=request.hashes,
                block_size=request.block_size,
            ),
            output_tokens=request.output_tokens,
            max_output_tokens=request.max_tokens,
            cancel_after_ns=None if end_ns is None else end_ns - request.arrival_ns,
        )
        for name, request in requests.items()
    ]


def slo_classes(requests: Sequence[OfferedRequest]) -> SLOClasses:
    """Return the classes through which a manifest passes weights to the engine.

    A class of a manifest has a TTFT and a TPOT target, which a mix may lack, so there are no
    classes if every request has the weight 1.
    """
    by_name = {request.slo_class: request for request in requests}
    if all(request.weight == 1 for request in requests):
        return SLOClasses()
    return SLOClasses(
        classes=tuple(
            SLOClass(
                name=name,
                ttft_ms=(request.targets.ttft_ns or 0) // NS_PER_MS,
                tpot_ms=(request.targets.tpot_ns or 0) // NS_PER_MS,
                priority=request.priority,
                weight=request.weight,
            )
            for name, request in by_name.items()
        ),
        default=next(iter(by_name)),
    )


def fleet_settings(
    cell: Cell, policy: str, seed: int, preemption: str, *, slo: SLOClasses
) -> FleetSettings:
    """Return the settings of a fleet that serves a cell."""
    fleet = cell.fleet
    return FleetSettings(
        service="cell",
        profile=fleet.profile(),
        configure=configuration(
            EngineSpec(
                policy=Policy(policy),
                preemption=Preemption(preemption),
                swap_space_gib=fleet.swap_gib,
                token_budget=TokenBudgetSpec(initial=fleet.token_budget),
                max_num_seqs=fleet.max_num_seqs,
                max_waiting=fleet.max_waiting,
            ),
            mode=ControlMode.AUTO,
            device=fleet.device,
        ),
        replicas=fleet.replicas,
        placement=fleet.placement,
        slo=slo,
        timeout_ns=round(cell.timeout_s * NS_PER_S),
        seed=seed,
    )
