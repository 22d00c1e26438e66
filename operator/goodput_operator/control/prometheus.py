"""Reads the routers' counters from a Prometheus server instead of from each router.

In this module, a *scrape* is the server's request to a router. The server's series equal the
router's counters at the time of the last scrape, so intervals extend from scrape to scrape. A
series is assigned to a router of the service's namespace by pod name, or by the address in
`instance`. Only samples of a router's last scrape count, for two reasons: the series of a process
remain visible for minutes after its restart, and two jobs that scrape one router duplicate its
series.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal

import aiohttp
import msgspec
from yarl import URL

from goodput_core.contract import (
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    LABEL_PROMISE,
    LABEL_RESULT,
    LABEL_SLO_CLASS,
    LABEL_STATUS,
    METRIC_PROMISES,
    METRIC_REQUESTS,
    METRIC_ROUTER_ARRIVALS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
)
from goodput_core.control import Signal, TargetCounts
from goodput_core.units import NS_PER_S
from goodput_operator.control.admin_ports import ScrapeError, fetch
from goodput_operator.control.readings import RouterCounters, Scrape, class_counters
from goodput_operator.untrusted import decode_untrusted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_operator.control.readings import ClassCounters, RouterScrape, ScrapeTarget

__all__ = ["decode_response", "failed_scrapes", "query_prometheus"]

_PATH: Final = "/api/v1/query"
_TIME_LIMITS: Final = aiohttp.ClientTimeout(total=5.0, connect=1.0)
_WINDOW: Final = "2m"
"""Series without a sample for this long are ignored; scrape intervals above a minute are rare."""
_NAME: Final = "__name__"
# Names of metrics and labels call an SLO target a promise.
_METRICS: Final = (
    METRIC_REQUESTS,
    METRIC_PROMISES,
    METRIC_ROUTER_ARRIVALS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
)
_MAX_COUNT: Final = 2**53
_MAX_BYTES: Final = 16 << 20
"""Twice the size of a response with the maximum number of classes and routers, scraped every ten
seconds."""


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    values: Annotated[list[tuple[float, str]], msgspec.Meta(min_length=1)]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: Literal["matrix"]
    result: list[_Series]


class _QueryResponse(msgspec.Struct, frozen=True):
    status: Literal["success"]
    data: _Data


_RESPONSE: Final = msgspec.json.Decoder(_QueryResponse)


@dataclass(slots=True)
class _RouterSeries:
    """Values of a router's series by metric and labels, from one scrape."""

    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    targets: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def add(self, labels: dict[str, str], value: int) -> None:
        name, slo_class = labels[_NAME], labels.get(LABEL_SLO_CLASS, "")
        if name == METRIC_REQUESTS:
            self.outcomes.setdefault(slo_class, {})[labels.get(LABEL_OUTCOME, "")] = value
        elif name == METRIC_PROMISES:
            key = slo_class, labels.get(LABEL_PROMISE, "")
            self.targets.setdefault(key, {})[labels.get(LABEL_RESULT, "")] = value
        else:
            self.numbers.setdefault(name, {})[labels.get(LABEL_STATUS, "")] = value

    def counters(self) -> RouterCounters | None:
        """Return the counters; None if the series that every router has are incomplete."""
        if not {METRIC_ROUTER_ARRIVALS, METRIC_ROUTER_IN_FLIGHT} <= self.numbers.keys():
            return None
        return RouterCounters(
            epoch="",
            uptime_ns=None,
            arrivals=self._number(METRIC_ROUTER_ARRIVALS),
            client_errors=self._number(METRIC_ROUTER_CLIENT_ERRORS),
            in_flight=self._number(METRIC_ROUTER_IN_FLIGHT),
            classes={name: self._class(name) for name in self.outcomes},
        )

    def _number(self, name: str) -> int:
        return sum(self.numbers.get(name, {}).values())

    def _class(self, name: str) -> ClassCounters:
        ttft, tpot = self._target(name, "ttft"), self._target(name, "tpot")
        return class_counters(self.outcomes[name], ttft=ttft, tpot=tpot)

    def _target(self, slo_class: str, target: str) -> TargetCounts:
        results = self.targets.get((slo_class, target), {})
        return TargetCounts(
            judged=sum(results.values()),
            missed=results.get("missed", 0),
            close=results.get("close", 0),
        )


async def query_prometheus(
    session: aiohttp.ClientSession,
    url: str,
    *,
    llmservice: str,
    namespace: str,
    targets: Sequence[ScrapeTarget],
) -> tuple[int, tuple[RouterScrape, ...]]:
    """Query the server for the counters of all routers of a service.

    Args:
        session: HTTP session.
        url: base URL of the server.
        llmservice: name of the service.
        namespace: namespace of the service.
        targets: routers of the service.

    Returns:
        The time of the oldest of the ready routers' last scrapes, in nanoseconds since 1970 (0 if
        there is none), and a result for each router: FAILED if the server does not respond, MISSING
        if it lacks the router's series.
    """
    # A range selector, since an instant vector has the query's time and not the scrape's.
    query = f'{{{_NAME}=~"{"|".join(_METRICS)}",{LABEL_LLMSERVICE}="{llmservice}"}}[{_WINDOW}]'
    try:
        body = await fetch(
            session,
            url.rstrip("/") + _PATH,
            time_limits=_TIME_LIMITS,
            max_bytes=_MAX_BYTES,
            params={"query": query},
        )
    except ScrapeError as error:
        return 0, failed_scrapes(targets, str(error))
    try:
        return decode_response(body, namespace=namespace, targets=targets)
    except ValueError as error:
        return 0, failed_scrapes(targets, f"{url}: {error}")


def failed_scrapes(targets: Sequence[ScrapeTarget], detail: str) -> tuple[RouterScrape, ...]:
    """Return a failed result for each router."""
    return tuple(Scrape(target=target, signal=Signal.FAILED, detail=detail) for target in targets)


def decode_response(
    body: bytes, *, namespace: str, targets: Sequence[ScrapeTarget]
) -> tuple[int, tuple[RouterScrape, ...]]:
    """Decode the server's response; the result is that of `query_prometheus`.

    Raises:
        ValueError: the body is not a response to the query.
    """
    by_pod: dict[str, list[_Series]] = {target.name: [] for target in targets}
    by_address = {URL(target.url).authority: by_pod[target.name] for target in targets}
    for series in _series(body):
        labels = series.metric
        if _NAME not in labels or labels.get("namespace", namespace) != namespace:
            continue
        if "pod" in labels:
            router_series = by_pod.get(labels["pod"])
        else:
            router_series = by_address.get(labels.get("instance", ""))
        if router_series is not None:
            router_series.append(series)
    scrapes, ready_at_s = [], []
    for target in targets:
        at_s, counters = _latest(by_pod[target.name])
        # Only ready routers determine the time: the last scrape of another may be older.
        if counters is not None and target.ready:
            ready_at_s.append(at_s)
        signal = Signal.MISSING if counters is None else Signal.FRESH
        detail = "" if counters else f"Prometheus has no current series of {target.name}"
        scrapes.append(Scrape(target=target, signal=signal, counters=counters, detail=detail))
    return round(min(ready_at_s, default=0) * NS_PER_S), tuple(scrapes)


def _latest(router_series: Sequence[_Series]) -> tuple[float, RouterCounters | None]:
    """Return the time of a router's last scrape, and its counters or None if series are missing."""
    at_s = max((series.values[-1][0] for series in router_series), default=0.0)
    latest = _RouterSeries()
    for series in router_series:
        sample_s, text = series.values[-1]
        if sample_s == at_s:
            latest.add(series.metric, _count(text))
    return at_s, latest.counters()


def _series(body: bytes) -> Iterable[_Series]:
    try:
        return decode_untrusted(_RESPONSE, body).data.result
    except ValueError as error:
        # The decoder's message may quote the response, which must not appear in conditions.
        raise ValueError("the response does not match the query") from error


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MAX_COUNT:  # NaN fails this comparison, too
        raise ValueError("a value in the response is not a count")
    return round(value)
