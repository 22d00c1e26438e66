"""Prediction of a run by a calibrated profile, in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.quantiles import P50, P99, quantile
from goodput_core.slo.record import Outcome
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import FleetSettings
from goodput_replay.plan import PlannedRequest, PromptKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.messages import Configure
    from goodput_replay.calibration.requests import ObservedRequest
    from goodput_replay.runs.slo import SLOClasses

    RecordPair = tuple[RequestRecord, RequestRecord]

__all__ = ["LatencyError", "compare_latencies", "completed_pairs", "mean_error", "predict"]

_TIMEOUT_NS: Final = 366 * 86_400 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyError:
    """One quantile of the held-out requests.

    Args:
        name: metric and quantile.
        measured_ms: its value in the run.
        predicted_ms: its value in virtual time.
    """

    name: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1 if self.measured_ms else 0.0


def predict(
    requests: Sequence[ObservedRequest],
    *,
    profile: DeviceProfile,
    configure: Configure,
    slo: SLOClasses,
) -> list[RequestRecord]:
    """Serve the requests of one replica in virtual time; each arrives when it was sent."""
    settings = FleetSettings(
        service="calibration",
        profile=profile,
        configure=configure,
        replicas=1,
        placement=RouterPolicy.LEAST_LOADED,
        slo=slo,
        timeout_ns=_TIMEOUT_NS,
    )
    records: list[RequestRecord] = []
    emulate(
        (_planned(number, one, slo) for number, one in enumerate(requests)),
        settings,
        lambda _, record: records.append(record),
    )
    return records


def _planned(number: int, one: ObservedRequest, slo: SLOClasses) -> PlannedRequest:
    record = one.record
    known = record.slo_class in slo.by_name()
    return PlannedRequest(
        request_id=record.request_id,
        scheduled_ns=one.arrival_ns,
        slo_class=record.slo_class if known else slo.default or "",
        targets=record.targets,
        priority=None,
        prompt=PromptKey(request_id=record.request_id, input_tokens=one.prompt_tokens),
        output_tokens=max(1, record.output_tokens),
        max_output_tokens=record.pinned_output_tokens,
        cancel_after_ns=None,
        number=number,
    )


def completed_pairs(
    measured: Iterable[ObservedRequest], predicted: Iterable[RequestRecord]
) -> list[RecordPair]:
    """Return the measured and the predicted record of each request that completed in both.

    Args:
        measured: requests of one run, in which each id is unique.
        predicted: their records in virtual time, and possibly others.
    """
    by_id = {one.request_id: one for one in predicted if one.outcome is Outcome.OK}
    return [
        (one.record, by_id[one.record.request_id])
        for one in measured
        if one.record.request_id in by_id and one.record.outcome is Outcome.OK
    ]


def compare_latencies(pairs: Sequence[RecordPair]) -> list[LatencyError]:
    """Return TTFT, TPOT and TBT, as measured and as predicted. TTFT begins at the send."""
    if not pairs:
        return []
    runs = [_RecordedLatencies(records) for records in zip(*pairs, strict=True)]
    errors: list[LatencyError] = []
    for name, share, label in (
        ("ttft_ns", P50, "TTFT p50"),
        ("ttft_ns", P99, "TTFT p99"),
        ("tpot_ns", P50, "TPOT p50"),
        ("tpot_ns", P99, "TPOT p99"),
        ("tbt_ns", P50, "TBT p50"),
        ("tbt_ns", P99, "TBT p99"),
    ):
        values = [run.quantile_ms(name, share) for run in runs]
        if values[0] is not None and values[1] is not None:
            errors.append(LatencyError(name=label, measured_ms=values[0], predicted_ms=values[1]))
    return errors


def mean_error(pairs: Sequence[RecordPair]) -> float:
    """Return the mean error of the requests; 0 without one.

    The error of a request is that of its TTFT and that of its TPOT together, each as the logarithm
    of the ratio.
    """
    errors = [
        math.fsum(
            abs(math.log(one / other))
            for one, other in (
                (measured.ttft_from_send_ns, predicted.ttft_from_send_ns),
                (measured.tpot_ns, predicted.tpot_ns),
            )
            if one and other
        )
        for measured, predicted in pairs
    ]
    return math.fsum(errors) / max(1, len(errors))


class _RecordedLatencies:
    """The latencies of some records, nanoseconds."""

    def __init__(self, records: Sequence[RequestRecord]) -> None:
        self._values: dict[str, list[int]] = {
            "ttft_ns": [
                record.ttft_from_send_ns
                for record in records
                if record.ttft_from_send_ns is not None
            ],
            "tpot_ns": [round(one.tpot_ns) for one in records if one.tpot_ns is not None],
            "tbt_ns": [gap * NS_PER_US for record in records for gap in record.gaps_us],
        }

    def quantile_ms(self, name: str, share: Fraction) -> float | None:
        """Return a quantile in milliseconds; None without values."""
        values = self._values[name]
        return quantile(values, share) / NS_PER_MS if values else None
