"""From the bytes of `GET /control/state` to counters; what does not fit the form counts nothing.

A process's answer is not trusted: every number is bounded, and one that is out of bounds makes
the whole answer unusable rather than a zero.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec

from goodput_core.contract import CLIENT_OUTCOMES, MAX_LIMITS_REVISION
from goodput_core.control import DeviceCapacity, PromiseCounts
from goodput_core.histogram import LengthBin
from goodput_core.steptime import (
    DistServeForm,
    RooflineForm,
    StepTimeForm,
    TableForm,
    UnitForm,
)
from goodput_core.units import NS_PER_S
from goodput_operator.measure.readings import ClassCounters, EngineCounters, RouterCounters
from goodput_operator.untrusted import decoded

__all__ = ["DENOMINATOR", "GOOD", "engine_counters", "router_counters"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Epoch = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_MOST_CLASSES: Final = 256
_MOST_BINS: Final = 4096
_MOST: Final = 1e15
GOOD: Final = "attained"
DENOMINATOR: Final = frozenset(CLIENT_OUTCOMES) - {"cancelled", "unjudged"}
_SETTLED: Final = 0.05
"""While steps take as long as predicted, within so much, no budget follows its device."""
_FORMS: Final[dict[str, type[StepTimeForm]]] = {
    "roofline": RooflineForm,
    "distserve": DistServeForm,
    "table": TableForm,
    "unit": UnitForm,
}


class _Promise(msgspec.Struct, frozen=True):
    judged: _Count = 0
    missed: _Count = 0
    close: _Count = 0

    def counts(self) -> PromiseCounts:
        return PromiseCounts(judged=self.judged, missed=self.missed, close=self.close)


class _Promises(msgspec.Struct, frozen=True):
    ttft: _Promise = _Promise()
    tpot: _Promise = _Promise()


class _Router(msgspec.Struct, frozen=True):
    epoch: _Epoch
    uptime_seconds: Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
    arrivals: _Count
    client_errors: _Count
    in_flight: _Count
    outcomes: Annotated[dict[_Name, dict[_Name, _Count]], msgspec.Meta(max_length=_MOST_CLASSES)]
    promises: Annotated[dict[_Name, _Promises], msgspec.Meta(max_length=_MOST_CLASSES)]


class _Bin(msgspec.Struct, frozen=True, array_like=True):
    requests: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    input_tokens: _Count
    cached_tokens: _Count
    output_tokens: _Count


class _Device(msgspec.Struct, frozen=True):
    step_time: dict[str, Any] = {}
    host_ns_per_step: _Count = 0
    host_ns_per_request: _Count = 0


class _Bounds(msgspec.Struct, frozen=True):
    token_budget: tuple[_Count, _Count] | None = None
    max_num_seqs: tuple[_Count, _Count] | None = None


class _Engine(msgspec.Struct, frozen=True):
    epoch: _Epoch
    running: _Count
    waiting: _Count
    preemptions: _Count
    kv_total_blocks: _Count
    kv_free_blocks: _Count
    block_size: _Count
    token_budget: _Count
    limits_revision: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMITS_REVISION)]
    answered: Annotated[list[_Bin], msgspec.Meta(max_length=_MOST_BINS)]
    max_num_seqs: _Count | None = None
    safety_percent: _Count | None = None
    bounds: _Bounds = _Bounds()
    budget_law: _Name = ""
    step_time_error: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    device: _Device = _Device()


_State = TypeVar("_State", _Router, _Engine)
_ROUTER: Final = msgspec.json.Decoder(_Router)
_ENGINE: Final = msgspec.json.Decoder(_Engine)


def router_counters(body: bytes) -> RouterCounters:
    """A router's counters.

    Raises:
        ValueError: there are none in it that can be used; in one sentence.
    """
    state = _state(_ROUTER, body)
    names = state.outcomes.keys() | state.promises.keys()
    return RouterCounters(
        epoch=state.epoch,
        uptime_ns=round(state.uptime_seconds * NS_PER_S),
        arrivals=state.arrivals,
        client_errors=state.client_errors,
        in_flight=state.in_flight,
        classes={
            name: _class(state.outcomes.get(name, {}), state.promises.get(name, _Promises()))
            for name in names
        },
    )


def engine_counters(body: bytes) -> EngineCounters:
    """An engine's counters and its state.

    Raises:
        ValueError: there are none in it that can be used, as while it starts; in one sentence.
    """
    state = _state(_ENGINE, body)
    paced = bool(state.budget_law)
    return EngineCounters(
        epoch=state.epoch,
        preemptions=state.preemptions,
        answered=tuple(
            LengthBin(
                requests=b.requests,
                input_tokens=b.input_tokens,
                cached_tokens=b.cached_tokens,
                output_tokens=b.output_tokens,
            )
            for b in state.answered
        ),
        limits_revision=state.limits_revision,
        paced=paced,
        running=state.running,
        waiting=state.waiting,
        kv_used_blocks=max(0, state.kv_total_blocks - state.kv_free_blocks),
        kv_total_blocks=state.kv_total_blocks,
        token_budget=state.token_budget,
        max_num_seqs=state.max_num_seqs,
        safety_percent=state.safety_percent if paced else None,
        token_bounds=state.bounds.token_budget,
        most_seqs=None if state.bounds.max_num_seqs is None else state.bounds.max_num_seqs[1],
        settled=not paced or state.step_time_error <= _SETTLED,
        device=_device(state.device, kv_tokens=state.kv_total_blocks * state.block_size),
    )


def _state(decoder: msgspec.json.Decoder[_State], body: bytes) -> _State:
    try:
        return decoded(decoder, body)
    except ValueError as error:
        raise ValueError(f"not a state that can be used: {error}") from error


def _class(outcomes: dict[str, int], promises: _Promises) -> ClassCounters:
    return ClassCounters(
        good=outcomes.get(GOOD, 0),
        total=sum(count for name, count in outcomes.items() if name in DENOMINATOR),
        ttft=promises.ttft.counts(),
        tpot=promises.tpot.counts(),
    )


def _device(told: _Device, *, kv_tokens: int) -> DeviceCapacity | None:
    """The law of step time; None: none that is known here, or with numbers that cannot be."""
    law = dict(told.step_time)
    form = _FORMS.get(str(law.pop("form", "")))
    if form is None or not _sane(law):
        return None
    try:
        made = msgspec.convert(law, type=form)
    except (ValueError, RecursionError):
        return None
    return DeviceCapacity(
        form=made,
        kv_tokens=kv_tokens,
        host_ns_per_step=told.host_ns_per_step,
        host_ns_per_request=told.host_ns_per_request,
    )


def _sane(value: Any) -> bool:
    """Whether all numbers are what a time, a token count or a coefficient can be."""
    if isinstance(value, dict):
        return all(map(_sane, value.values()))
    if isinstance(value, list):
        return all(map(_sane, value))
    return value is None or (isinstance(value, int | float) and 0 <= value <= _MOST)
