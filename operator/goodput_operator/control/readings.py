"""Readings: the counters of a service's routers and engines at one time, and their decoding.

Responses of other processes are not trusted. Every number has bounds, and a number out of bounds
makes the complete response unusable. A Prometheus server may deliver the counters instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from goodput_core.contract import CLIENT_OUTCOMES, MAX_LIMITS_REVISION
from goodput_core.control import DeviceCapacity, Signal, TargetCounts
from goodput_core.engine_state import EngineState
from goodput_core.histogram import LengthBin
from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.window import RING_S, RecentSeconds
from goodput_core.steptime import (
    DistServeForm,
    PiecewiseForm,
    RooflineForm,
    StepTimeForm,
    TableForm,
    UnitForm,
)
from goodput_core.units import NS_PER_S
from goodput_operator.untrusted import decode_untrusted

__all__ = [
    "ClassCounters",
    "EngineCounters",
    "EngineScrape",
    "RouterCounters",
    "RouterScrape",
    "Scrape",
    "ScrapeTarget",
    "ServiceReading",
    "class_counters",
    "decode_engine",
    "decode_router",
]

_MAX_COUNT: Final = 2**53
_MAX_NUMBER: Final = 1e15
_MAX_CLASSES: Final = 256
_MAX_BINS: Final = 4096
_MAX_TEXT: Final = 256
_MAX_PROBLEM: Final = 1024
_ATTAINED: Final = "attained"
_DENOMINATOR: Final = frozenset(CLIENT_OUTCOMES) - {"cancelled", "unjudged"}
_BOUNDED: Final = (
    *("running", "waiting", "preemptions", "kv_total_blocks", "kv_free_blocks", "block_size"),
    *("token_budget", "max_num_seqs", "safety_percent", "step_time_error"),
)
"""Numbers of an engine's state that the control loop reads."""
_FORMS: Final[dict[str, type[StepTimeForm]]] = {
    "roofline": RooflineForm,
    "distserve": DistServeForm,
    "table": TableForm,
    "piecewise": PiecewiseForm,
    "unit": UnitForm,
}

_Counters = TypeVar("_Counters")
_Body = TypeVar("_Body")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeTarget:
    """A process that can be scraped.

    Args:
        name: name of the pod or process.
        uid: unique id; a later process of the same name has another one.
        url: URL of the admin port; of another server than Goodput's, URL of its metrics page, empty
            if it has none.
        ready: True if the process must respond; a starting or stopping process need not.
        foreign: True for another server than Goodput's engine.
    """

    name: str
    uid: str
    url: str
    ready: bool = True
    foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounters:
    """Counters of one class since the start of a router.

    Args:
        good: requests that met their targets.
        total: requests in the denominator: attained, missed, shed, error and timeout.
        ttft, tpot: counts of met and missed targets.
    """

    good: int = 0
    total: int = 0
    ttft: TargetCounts = field(default_factory=TargetCounts)
    tpot: TargetCounts = field(default_factory=TargetCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCounters:
    """Counters of one router since its start.

    Args:
        epoch: identifier of the start; empty if not known.
        uptime_ns: time since the start; None if not known.
        arrivals: requests that arrived.
        client_errors: arrivals rejected because of an error of the client.
        in_flight: requests without an outcome.
        classes: counters of each class by name.
        seconds: judged requests of the last hour by second; None if not requested.
        tenants_problem: why the router does not use the present content of its file of tenants;
            empty if it does, or has none.
    """

    epoch: str
    uptime_ns: int | None
    arrivals: int
    client_errors: int
    in_flight: int
    classes: Mapping[str, ClassCounters]
    seconds: RecentSeconds | None = None
    tenants_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Counters and state of one engine since its start.

    Args:
        epoch: identifier of the start.
        state: counters, requests and limits.
        lengths: length histogram of the finished requests; each bin occurs once.
        token_bounds: bounds of the token budget in the engine's manifest; None if not known.
        max_width: upper bound of the batch width in that manifest; None if not known.
        device: step-time law and memory of the device; None if not known.
        foreign: True for another server than Goodput's engine. It has no limits that can change,
            and its lengths are one bin of all finished requests.
        unknown: counters of the state that such a server does not publish.
    """

    epoch: str
    state: EngineState
    lengths: tuple[LengthBin, ...] = ()
    token_bounds: tuple[int, int] | None = None
    max_width: int | None = None
    device: DeviceCapacity | None = None
    foreign: bool = False
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)  # slots: frozen generics with slots fail on Python 3.11
class Scrape(Generic[_Counters]):
    """Result of scraping one process.

    Args:
        target: the process.
        signal: FRESH with counters, MISSING if the process responded without them, FAILED if it
            did not respond.
        counters: the counters; None unless FRESH.
        detail: message for users; empty if FRESH.
    """

    target: ScrapeTarget
    signal: Signal
    counters: _Counters | None = None
    detail: str = ""


RouterScrape = Scrape[RouterCounters]
EngineScrape = Scrape[EngineCounters]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceReading:
    """Counters of all processes of a service at one time.

    Args:
        at_ns: time of the counters, on one clock for all readings of the service.
        routers, engines: one scrape of each process.
    """

    at_ns: int
    routers: tuple[RouterScrape, ...] = ()
    engines: tuple[EngineScrape, ...] = ()


_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_SecondCount = Annotated[int, msgspec.Meta(ge=0, le=10**6)]
_Epoch = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]


class _TargetsBody(msgspec.Struct, frozen=True):
    ttft: TargetCounts = TargetCounts()
    tpot: TargetCounts = TargetCounts()

    def __post_init__(self) -> None:
        for counts in (self.ttft, self.tpot):
            if not all(0 <= n <= _MAX_COUNT for n in astuple(counts)):
                raise ValueError("a count is out of bounds")


class _SecondCountsBody(msgspec.Struct, frozen=True):
    good: Annotated[list[_SecondCount], msgspec.Meta(max_length=RING_S)]
    total: Annotated[list[_SecondCount], msgspec.Meta(max_length=RING_S)]


class _SecondsBody(msgspec.Struct, frozen=True):
    first_s: _Count
    end_s: _Count
    classes: Annotated[dict[_Name, _SecondCountsBody], msgspec.Meta(max_length=_MAX_CLASSES)]


class _RouterBody(msgspec.Struct, frozen=True):
    epoch: _Epoch
    uptime_seconds: Annotated[float, msgspec.Meta(ge=0, le=_MAX_NUMBER)]
    arrivals: _Count
    client_errors: _Count
    in_flight: _Count
    outcomes: Annotated[dict[_Name, dict[_Name, _Count]], msgspec.Meta(max_length=_MAX_CLASSES)]
    promises: Annotated[dict[_Name, _TargetsBody], msgspec.Meta(max_length=_MAX_CLASSES)]
    seconds: _SecondsBody | None = None
    tenants_problem: Annotated[str, msgspec.Meta(max_length=_MAX_PROBLEM)] = ""


class _BinBody(msgspec.Struct, frozen=True, array_like=True):
    requests: Annotated[int, msgspec.Meta(ge=1, le=_MAX_COUNT)]
    input_tokens: _Count
    cached_tokens: _Count
    output_tokens: _Count

    def __post_init__(self) -> None:
        if self.cached_tokens > self.input_tokens:
            raise ValueError("more tokens are cached than prompts have")


class _DeviceBody(msgspec.Struct, frozen=True):
    step_time: dict[str, Any] = {}
    host_ns_per_step: _Count = 0
    host_ns_per_request: _Count = 0


class _BoundsBody(msgspec.Struct, frozen=True):
    token_budget: tuple[_Count, _Count] | None = None
    max_num_seqs: tuple[_Count, _Count] | None = None


class _EngineBody(msgspec.Struct, frozen=True):
    """Fields that the server adds to the flat `EngineState`."""

    epoch: _Epoch
    answered: Annotated[list[_BinBody], msgspec.Meta(max_length=_MAX_BINS)]
    running: _Count
    """Part of `EngineState`, absent until the engine core has started."""
    bounds: _BoundsBody = _BoundsBody()
    device: _DeviceBody = _DeviceBody()


_ROUTER: Final = msgspec.json.Decoder(_RouterBody)
_ENGINE: Final = msgspec.json.Decoder(_EngineBody)
_ENGINE_STATE: Final = msgspec.json.Decoder(EngineState)


def decode_router(body: bytes) -> RouterCounters:
    """Decode a router's response.

    Raises:
        ValueError: the response has no usable counters.
    """
    state = _state(_ROUTER, body)
    classes = {}
    for name in state.outcomes.keys() | state.promises.keys():
        targets = state.promises.get(name, _TargetsBody())
        classes[name] = class_counters(
            state.outcomes.get(name, {}), ttft=targets.ttft, tpot=targets.tpot
        )
    return RouterCounters(
        epoch=state.epoch,
        uptime_ns=round(state.uptime_seconds * NS_PER_S),
        arrivals=state.arrivals,
        client_errors=state.client_errors,
        in_flight=state.in_flight,
        classes=classes,
        seconds=None if state.seconds is None else _recent_seconds(state.seconds),
        tenants_problem=state.tenants_problem,
    )


def _recent_seconds(seconds: _SecondsBody) -> RecentSeconds:
    length_s = seconds.end_s - seconds.first_s
    if not 0 <= length_s <= RING_S:
        raise ValueError(f"the state cannot be used: {length_s} seconds")
    for name, counts in seconds.classes.items():
        pairs = zip(counts.good, counts.total, strict=False)
        lengths = {len(counts.good), len(counts.total)}
        if lengths != {length_s} or any(good > total for good, total in pairs):
            raise ValueError(f"the state cannot be used: the seconds of {name[:64]!r}")
    return RecentSeconds(
        first_s=seconds.first_s,
        end_s=seconds.end_s,
        classes={
            name: SecondCounts(good=counts.good, total=counts.total)
            for name, counts in seconds.classes.items()
            if length_s
        },
    )


def class_counters(
    outcomes: Mapping[str, int], *, ttft: TargetCounts, tpot: TargetCounts
) -> ClassCounters:
    """Return the counters of a class from its requests by outcome."""
    return ClassCounters(
        good=outcomes.get(_ATTAINED, 0),
        total=sum(count for name, count in outcomes.items() if name in _DENOMINATOR),
        ttft=ttft,
        tpot=tpot,
    )


def decode_engine(body: bytes) -> EngineCounters:
    """Decode an engine's response.

    Raises:
        ValueError: the response has no usable state, for example while the engine starts.
    """
    extra, state = _state(_ENGINE, body), _state(_ENGINE_STATE, body)
    for name in _BOUNDED:
        if not 0 <= getattr(state, name) <= _MAX_COUNT:
            raise ValueError(f"the state cannot be used: {name} is out of bounds")
    if not 0 <= state.limits_revision <= MAX_LIMITS_REVISION or len(state.budget_law) > _MAX_TEXT:
        raise ValueError("the state cannot be used: limits_revision or budget_law")
    width = extra.bounds.max_num_seqs
    return EngineCounters(
        epoch=extra.epoch,
        state=state,
        lengths=tuple(LengthBin(**msgspec.structs.asdict(bin_)) for bin_ in extra.answered),
        token_bounds=extra.bounds.token_budget,
        max_width=None if width is None else width[1],
        device=_device(extra.device, kv_tokens=state.kv_total_blocks * state.block_size),
    )


def _state(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decode_untrusted(decoder, body)
    except ValueError as error:
        raise ValueError(f"the state cannot be used: {error}") from error


def _device(body: _DeviceBody, *, kv_tokens: int) -> DeviceCapacity | None:
    """Return the device; None if its form is unknown or a number is out of bounds."""
    coefficients = dict(body.step_time)
    form = _FORMS.get(str(coefficients.pop("form", "")))
    if form is None or not _in_range(coefficients):
        return None
    try:
        step_time = msgspec.convert(coefficients, type=form)
    except (ValueError, RecursionError):
        return None
    return DeviceCapacity(
        form=step_time,
        kv_tokens=kv_tokens,
        host_ns_per_step=body.host_ns_per_step,
        host_ns_per_request=body.host_ns_per_request,
    )


def _in_range(value: Any) -> bool:
    """True if each number is plausible as a time, a token count or a coefficient."""
    if isinstance(value, dict):
        return all(map(_in_range, value.values()))
    if isinstance(value, list):
        return all(map(_in_range, value))
    return value is None or (isinstance(value, int | float) and 0 <= value <= _MAX_NUMBER)
