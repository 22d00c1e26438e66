"""The fair share of tenants, in virtual time.

In each load, tenants below their shares are served alone, and beside a flood of ten times a share
or more, for 30 of 60 seconds. The router's own decisions (`goodput_core.tenants`) run before an
emulated fleet. The table has the requests of these tenants that met their targets and that were
rejected: alone without shares, alone, and beside the flood; and the largest loss of one of them. A
flood that leaves capacity free must have no 429. The rule was tuned on the loads marked with *; the
others were chosen before, and were run first afterwards, or to find causes.

    python -m benchmarks.tenants
    python -m benchmarks.tenants --quick    # one load, in seconds
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.tenants.admission import ServiceCapacity, TenantAdmission, TenantRequest
from goodput_core.units import NS_PER_S
from goodput_engine.manifest_file import read_manifest
from goodput_engine.openai.errors import overloaded
from goodput_replay.emulation.fleet import VirtualFleet
from goodput_replay.emulation.requests import make_rejected_record
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.plan import PlannedRequest, PromptKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.settings import FleetSettings

__all__ = ["LOADS", "TenantLoad", "TenantLoads", "TenantResult", "main", "serve"]

_MANIFEST: Final = Path(__file__).parents[1] / "examples" / "chat.yaml"
_CLASS: Final = "interactive"
_SEED: Final = 1
_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoad:
    """The traffic of one tenant, with Poisson arrivals and lognormal lengths.

    Args:
        per_s: requests per second.
        begin_s: time of its first request.
        input_tokens, output_tokens: median lengths.
        weight: weight of the tenant.
        is_flood: True if its own promises are not judged.
        end_s: time after which it sends no more requests.
        burst: number of requests that arrive at once.
        slo_class: class of its requests.
        shared_tokens: length of a prefix that all its prompts have in addition.
    """

    per_s: float
    begin_s: float = 0
    input_tokens: int = 500
    output_tokens: int = 150
    weight: int = 1
    is_flood: bool = False
    end_s: float = 60
    burst: int = 1
    slo_class: str = _CLASS
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoads:
    """Tenants below their shares, which are judged beside floods and without them.

    Args:
        tenants: the traffic by tenant; without a flood, no request may be rejected.
        replicas: number of replicas.
        held_out: True if the rule was not tuned on the load.
        serves_flood: True if the capacity suffices for the floods, which must not be rejected.
    """

    tenants: Mapping[str, TenantLoad]
    replicas: int = 1
    held_out: bool = False
    serves_flood: bool = False


def _small(
    per_s: float,
    input_tokens: int = 500,
    output_tokens: int = 150,
    *,
    weight: int = 1,
    burst: int = 1,
    slo_class: str = _CLASS,
    shared_tokens: int = 0,
) -> TenantLoad:
    return TenantLoad(
        per_s=per_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        weight=weight,
        burst=burst,
        slo_class=slo_class,
        shared_tokens=shared_tokens,
    )


def _flood(
    per_s: float,
    input_tokens: int,
    output_tokens: int,
    *,
    begin_s: float = 10,
    end_s: float = 40,
    **more: int | str,
) -> TenantLoad:
    load = _small(per_s, input_tokens, output_tokens, **more)  # type: ignore[arg-type]
    return replace(load, begin_s=begin_s, end_s=end_s, is_flood=True)


LOADS: Final[Mapping[str, TenantLoads]] = {
    "very long outputs": TenantLoads(tenants={"a": _small(9), "flood": _flood(40, 200, 2000)}),
    "very long prompts": TenantLoads(
        replicas=4, tenants={"a": _small(36), "flood": _flood(40, 16_000, 20)}
    ),
    "many tiny requests": TenantLoads(
        tenants={**{f"t{n}": _small(4) for n in range(4)}, "flood": _flood(800, 20, 5)}
    ),
    "a tenant with bursts": TenantLoads(
        replicas=4, tenants={"a": _small(30, burst=10), "flood": _flood(400, 500, 150)}
    ),
    "flood of another class": TenantLoads(
        tenants={"a": _small(9), "flood": _flood(60, 2000, 600, slo_class="batch")}
    ),
    "weights, five tenants": TenantLoads(
        replicas=4,
        tenants={
            "a": _small(25, weight=3),
            **{f"t{n}": _small(8) for n in range(3)},
            "flood": _flood(200, 50, 800, weight=2),
        },
    ),
    "long requests beside a short flood": TenantLoads(
        tenants={"a": _small(1.8, 3000, 400), "flood": _flood(400, 100, 30)}
    ),
    "pulses": TenantLoads(
        tenants={
            "a": _small(9),
            **{
                f"flood{n}": _flood(200, 300, 300, begin_s=10 + 8 * n, end_s=13 + 8 * n)
                for n in range(4)
            },
        }
    ),
    "mixed lengths without a flood": TenantLoads(
        replicas=2, tenants={"a": _small(16), "b": _small(2.8, 2000, 600)}
    ),
    "a large tenant in free capacity": TenantLoads(
        replicas=2,
        serves_flood=True,
        tenants={"a": _small(5), "b": _small(5), "flood": _flood(30, 500, 150)},
    ),
    "longest outputs": TenantLoads(
        held_out=True, replicas=4, tenants={"a": _small(36), "flood": _flood(100, 100, 3000)}
    ),
    "five kinds of tenants": TenantLoads(
        held_out=True,
        tenants={
            "chat": _small(4),
            "code": _small(1.5, 1500, 300),
            "documents": _small(0.6, 6000, 80),
            "tiny": _small(20, 40, 10),
            "flood": _flood(40, 8000, 800),
        },
    ),
    "weights 5 and 1, a flood of bursts": TenantLoads(
        held_out=True,
        replicas=4,
        tenants={
            "a": _small(50, weight=5),
            "b": _small(8),
            "flood": _flood(300, 1000, 300, burst=200),
        },
    ),
    "batch class beside a chatty flood": TenantLoads(
        held_out=True,
        tenants={
            "a": _small(1.5, 3000, 400, slo_class="batch"),
            "b": _small(4),
            "flood": _flood(100, 10, 400),
        },
    ),
    "three kinds of tenants without a flood": TenantLoads(
        held_out=True,
        replicas=4,
        tenants={"a": _small(30), "b": _small(5, 2000, 600), "c": _small(2, 8000, 50)},
    ),
    "two kinds of tenants without a flood": TenantLoads(
        held_out=True, tenants={"a": _small(8, 200, 100), "b": _small(1.2, 4000, 300)}
    ),
    "bursts beside long outputs without a flood": TenantLoads(
        held_out=True,
        replicas=2,
        tenants={"a": _small(10, burst=8), "b": _small(3, 300, 900), "c": _small(6, 1200, 80)},
    ),
    "documents, tiny and chat beside a flood of documents": TenantLoads(
        held_out=True,
        replicas=2,
        tenants={
            "documents": _small(1.2, 6000, 80),
            "tiny": _small(40, 40, 10),
            "chat": _small(8),
            "flood": _flood(60, 6000, 200),
        },
    ),
    "nine kinds of tenants without a flood": TenantLoads(
        held_out=True,
        replicas=4,
        tenants={
            f"t{n}": _small(per_s, input_tokens, output_tokens)
            for n, (per_s, input_tokens, output_tokens) in enumerate(
                [
                    *((12, 300, 200), (6, 1000, 100), (1, 7000, 150), (30, 50, 20)),
                    *((2, 500, 1200), (3, 2500, 250), (8, 700, 60), (0.6, 12_000, 40)),
                    (4, 150, 600),
                ]
            )
        },
    ),
    "documents of the batch class without a flood": TenantLoads(
        held_out=True,
        replicas=2,
        tenants={
            "chat": _small(14),
            "documents": _small(1.5, 10_000, 300, slo_class="batch"),
            "code": _small(2, 2000, 400),
        },
    ),
    "code, documents and tiny beside a flood of code": TenantLoads(
        held_out=True,
        tenants={
            "code": _small(1.2, 2500, 200),
            "documents": _small(0.4, 8000, 100),
            "tiny": _small(15, 60, 20),
            "flood": _flood(80, 2500, 200),
        },
    ),
    "long requests beside pulses of other tenants": TenantLoads(
        tenants={
            "a": _small(1.8, 3000, 400),
            **{
                f"flood{n}": _flood(400, 100, 30, begin_s=10 + 8 * n, end_s=13 + 8 * n)
                for n in range(4)
            },
        },
    ),
    "chat beside pulses of documents": TenantLoads(
        tenants={
            "a": _small(12),
            **{
                f"flood{n}": _flood(12, 6000, 100, begin_s=8 + 7 * n, end_s=11 + 7 * n)
                for n in range(6)
            },
        },
    ),
    "long and chat beside a short flood": TenantLoads(
        tenants={"a": _small(1.2, 4000, 300), "b": _small(5), "flood": _flood(300, 100, 40)},
    ),
    "chat and an agent with a cached prefix": TenantLoads(
        tenants={
            "a": _small(9),
            "agent": _small(0.2, 100, 20, shared_tokens=16_000),
            "flood": _flood(60, 1000, 100),
        },
    ),
    "long outputs in free capacity": TenantLoads(
        held_out=True,
        replicas=4,
        serves_flood=True,
        tenants={"a": _small(10), "flood": _flood(8, 200, 1500)},
    ),
}


@dataclass(slots=True)
class TenantResult:
    """The outcome of one tenant.

    Attributes:
        good, total: requests that met their targets, and all.
        rejected: requests that got 429.
        tokens: tokens of complete requests.
    """

    good: int = 0
    total: int = 0
    rejected: int = 0
    tokens: int = 0

    @property
    def percent(self) -> float:
        """Requests that met their targets, in percent."""
        return 100 * self.good / self.total


class _Fleet(VirtualFleet):
    """A fleet behind a router with tenants; without one by default."""

    admission: TenantAdmission | None = None

    def __init__(
        self,
        settings: FleetSettings,
        on_record: Callable[[PlannedRequest, RequestRecord], None],
    ) -> None:
        super().__init__(settings, on_record)
        self._admitted: dict[int, TenantRequest] = {}

    def _receive(self, planned: PlannedRequest, rid: int, now_ns: int) -> None:
        admission = self.admission
        if admission is None:
            super()._receive(planned, rid, now_ns)
            return
        waiting = [(n, r) for n, r in self._admitted.items() if not r.started]
        for number, other in waiting:
            live = self._live.get(number)
            if live is not None and live.spans.parts:
                admission.start(other, now_ns)
        if admission.observation_due(now_ns):
            for number, other in self._admitted.items():
                live = self._live.get(number)
                tokens = 0 if live is None else len(live.replica.times(live))
                admission.observe(other, tokens, now_ns)
        request = TenantRequest(
            tenant=planned.session_id,
            slo_class=planned.slo_class,
            prompt_tokens=planned.prompt.input_tokens,
        )
        capacity = ServiceCapacity(
            replicas=len(self.replicas),
            places=sum(r.core.scheduler.limits.max_num_seqs for r in self.replicas),
            memory_tokens=sum(
                r.core.scheduler.total_blocks * self.settings.profile.block_size
                for r in self.replicas
            ),
        )
        if not admission.admit(request, capacity, now_ns):
            error = overloaded("more than its share", 1)
            self._end(rid, planned, make_rejected_record(planned, error, now_ns))
            return
        self._admitted[rid] = request
        super()._receive(planned, rid, now_ns)
        if rid in self._live:
            admission.send(request, self._live[rid].replica.name, now_ns)

    def _end(self, rid: int, planned: PlannedRequest, record: RequestRecord) -> None:
        request = self._admitted.pop(rid, None)
        if request is not None:
            assert self.admission is not None
            assert record.end_ns is not None
            served = record.outcome is Outcome.OK
            if served:
                self.admission.start(request, record.end_ns)
            self.admission.end(
                request,
                prompt_tokens=request.prompt_tokens if served else 0,
                output_tokens=planned.output_tokens if served else 0,
                now_ns=record.end_ns,
            )
        super()._end(rid, planned, record)


def serve(
    load: TenantLoads, *, floods: bool = True, shares: bool = True, seed: int = _SEED
) -> dict[str, TenantResult]:
    """Serve the tenants in virtual time, and return their outcomes.

    Args:
        load: the traffic and the replicas.
        floods: False to leave out the floods.
        shares: True to enforce fair shares.
        seed: seed of arrivals and lengths.
    """
    tenants = {name: t for name, t in load.tenants.items() if floods or not t.is_flood}
    service = read_manifest(_MANIFEST)
    settings = fleet_settings(
        service, device=None, source=str(_MANIFEST), timeout_ns=600 * NS_PER_S
    )
    settings = replace(settings, replicas=load.replicas)
    classes = service.spec.slo.by_name()
    results = {name: TenantResult() for name in tenants}

    def count(planned: PlannedRequest, record: RequestRecord) -> None:
        result = results[planned.session_id]
        result.total += 1
        targets = classes[planned.slo_class].targets
        result.good += judge(record, targets).kind is JudgementKind.ATTAINED
        result.rejected += record.outcome is Outcome.SHED
        if record.outcome is Outcome.OK:
            result.tokens += planned.prompt.input_tokens + planned.output_tokens

    fleet = _Fleet(settings, count)
    if shares:
        weights = {name: tenant.weight for name, tenant in tenants.items()}
        fleet.admission = TenantAdmission(classes, weights)
    fleet.run(_requests(tenants, seed), ())
    return results


def _requests(tenants: Mapping[str, TenantLoad], seed: int) -> Iterator[PlannedRequest]:
    rows: list[tuple[float, str, int, int]] = []
    for name, load in tenants.items():
        rng = random.Random(f"{seed}-{name}")
        at_s = load.begin_s + rng.expovariate(load.per_s)
        while at_s < load.end_s:
            for _ in range(load.burst):
                lengths = [
                    max(1, round(rng.lognormvariate(0, 0.7) * median))
                    for median in (load.input_tokens, load.output_tokens)
                ]
                rows.append((at_s, name, lengths[0], lengths[1]))
            at_s += rng.expovariate(load.per_s / load.burst)
    for number, (at_s, name, input_tokens, output_tokens) in enumerate(sorted(rows)):
        yield PlannedRequest(
            request_id=str(number),
            scheduled_ns=round(at_s * NS_PER_S),
            slo_class=tenants[name].slo_class,
            targets=Targets(),
            priority=None,
            prompt=_prompt(str(number), input_tokens, shared_tokens=tenants[name].shared_tokens),
            output_tokens=output_tokens,
            max_output_tokens=None,
            cancel_after_ns=None,
            session_id=name,
            number=number,
        )


def _prompt(request_id: str, input_tokens: int, *, shared_tokens: int) -> PromptKey:
    """Return a prompt of new tokens, behind the shared prefix if the tenant has one."""
    return PromptKey(
        request_id=request_id,
        input_tokens=shared_tokens + input_tokens,
        hashes=tuple(range(shared_tokens // _BLOCK_TOKENS)),
        block_size=_BLOCK_TOKENS if shared_tokens else 0,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one load")
    parser.add_argument("--seed", type=int, default=_SEED)
    args = parser.parse_args(argv)
    loads = dict(list(LOADS.items())[:1]) if args.quick else LOADS
    table = Table(
        *("load", "alone, no shares", "alone", "429", "beside floods", "429", "worst"),
        *("429 of floods", "tokens/s"),
    )
    for name, load in loads.items():
        calm = [tenant for tenant, traffic in load.tenants.items() if not traffic.is_flood]
        unshared = serve(load, floods=False, shares=False, seed=args.seed)
        alone = serve(load, floods=False, seed=args.seed)
        shared = serve(load, seed=args.seed)
        floods = [result for tenant, result in shared.items() if tenant not in calm]
        table.add_row(
            name if load.held_out else f"{name} *",
            _percent([unshared[t] for t in calm]),
            *_kept([alone[t] for t in calm]),
            *_kept([shared[t] for t in calm]),
            f"{min(shared[t].percent - alone[t].percent for t in calm):+.1f}",
            f"{sum(r.rejected for r in floods)} of {sum(r.total for r in floods)}",
            f"{sum(r.tokens for r in shared.values()) / 60:,.0f}",
        )
    Console(width=140).print(table)
    return 0


def _kept(results: list[TenantResult]) -> tuple[str, str]:
    return _percent(results), f"{sum(r.rejected for r in results)}"


def _percent(results: list[TenantResult]) -> str:
    return f"{100 * sum(r.good for r in results) / sum(r.total for r in results):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
