"""Routers' counters from a Prometheus server that scrapes them, in place of asking each one.

The server holds each router's series since its start, so reading it gives the same counters as
asking would, as old as its last scrape: intervals run from scrape to scrape. A series is a
router's if it bears its pod's name, or its address as instance, and no other namespace. Of one
router's, only what its last scrape brought counts: what a process before a restart exported is
found for minutes, and two jobs that scrape one router bring all of its numbers twice.
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
from goodput_core.control import PromiseCounts, Signal
from goodput_core.units import NS_PER_S
from goodput_operator.measure.decoding import DENOMINATOR, GOOD
from goodput_operator.measure.gathering import NoAnswerError, fetch
from goodput_operator.measure.readings import ClassCounters, RouterCounters, RouterScrape
from goodput_operator.untrusted import decoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_operator.measure.readings import Source

__all__ = ["ask_prometheus", "query_of", "read_answer", "unasked"]

_PATH: Final = "/api/v1/query"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0, connect=1.0)
_WINDOW: Final = "2m"
"""Series without a sample for so long count as gone; scrapes are seldom a minute apart."""
_NAME: Final = "__name__"
_COUNTED: Final = (
    METRIC_REQUESTS,
    METRIC_PROMISES,
    METRIC_ROUTER_ARRIVALS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
)
_MOST: Final = 2**53
_MOST_BYTES: Final = 16 << 20
"""Of one answer: all classes that a manifest may have, at as many routers, scraped each ten
seconds, are half of it."""


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    values: Annotated[list[tuple[float, str]], msgspec.Meta(min_length=1)]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: Literal["matrix"]
    result: list[_Series]


class _Answer(msgspec.Struct, frozen=True):
    status: Literal["success"]
    data: _Data


_ANSWER: Final = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class _Sums:
    """What the series of one scrape of a router add up to, while they are read."""

    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    promises: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def take(self, labels: dict[str, str], value: int) -> None:
        name, slo_class = labels[_NAME], labels.get(LABEL_SLO_CLASS, "")
        if name == METRIC_REQUESTS:
            self.outcomes.setdefault(slo_class, {})[labels.get(LABEL_OUTCOME, "")] = value
        elif name == METRIC_PROMISES:
            of = self.promises.setdefault((slo_class, labels.get(LABEL_PROMISE, "")), {})
            of[labels.get(LABEL_RESULT, "")] = value
        else:
            self.numbers.setdefault(name, {})[labels.get(LABEL_STATUS, "")] = value

    def counters(self) -> RouterCounters | None:
        """None: not all that every router has is there."""
        if not {METRIC_ROUTER_ARRIVALS, METRIC_ROUTER_IN_FLIGHT} <= self.numbers.keys():
            return None
        return RouterCounters(
            epoch="",
            uptime_ns=None,
            arrivals=self._number(METRIC_ROUTER_ARRIVALS),
            client_errors=self._number(METRIC_ROUTER_CLIENT_ERRORS),
            in_flight=self._number(METRIC_ROUTER_IN_FLIGHT),
            classes={name: self._class(name, of) for name, of in self.outcomes.items()},
        )

    def _number(self, name: str) -> int:
        return sum(self.numbers.get(name, {}).values())

    def _class(self, name: str, outcomes: dict[str, int]) -> ClassCounters:
        return ClassCounters(
            good=outcomes.get(GOOD, 0),
            total=sum(count for outcome, count in outcomes.items() if outcome in DENOMINATOR),
            ttft=self._promise(name, "ttft"),
            tpot=self._promise(name, "tpot"),
        )

    def _promise(self, slo_class: str, promise: str) -> PromiseCounts:
        results = self.promises.get((slo_class, promise), {})
        return PromiseCounts(
            judged=sum(results.values()),
            missed=results.get("missed", 0),
            close=results.get("close", 0),
        )


def query_of(llmservice: str) -> str:
    """PromQL for the latest samples of a service's routers, with their own times."""
    return f'{{{_NAME}=~"{"|".join(_COUNTED)}",{LABEL_LLMSERVICE}="{llmservice}"}}[{_WINDOW}]'


async def ask_prometheus(
    session: aiohttp.ClientSession,
    url: str,
    *,
    llmservice: str,
    namespace: str,
    sources: Sequence[Source],
) -> tuple[int, tuple[RouterScrape, ...]]:
    """One reading of all routers of a service.

    Args:
        session: of HTTP.
        url: the server's base URL.
        llmservice: the service's name.
        namespace: the service's.
        sources: its routers.

    Returns:
        When that router of them was last scraped whose last scrape is the oldest, in nanoseconds
        since 1970, and a scrape for each: FAILED where the server does not answer, MISSING where
        it has no numbers.
    """
    query = {"query": query_of(llmservice)}
    try:
        body = await fetch(
            session,
            url.rstrip("/") + _PATH,
            within=_TIMEOUT,
            most_bytes=_MOST_BYTES,
            params=query,
        )
    except NoAnswerError as error:
        return 0, unasked(sources, str(error))
    try:
        return read_answer(body, namespace=namespace, sources=sources)
    except ValueError as error:
        return 0, unasked(sources, f"{url}: {error}")


def unasked(sources: Sequence[Source], detail: str) -> tuple[RouterScrape, ...]:
    """Routers of which nothing is known, and why."""
    return tuple(
        RouterScrape(source=source, signal=Signal.FAILED, detail=detail) for source in sources
    )


def read_answer(
    body: bytes, *, namespace: str, sources: Sequence[Source]
) -> tuple[int, tuple[RouterScrape, ...]]:
    """The same from the server's answer.

    Raises:
        ValueError: it is not an answer to the query; in one sentence.
    """
    by_pod: dict[str, list[_Series]] = {source.name: [] for source in sources}
    by_address = {URL(source.url).authority: by_pod[source.name] for source in sources}
    for series in _series(body):
        labels = series.metric
        if _NAME not in labels or labels.get("namespace", namespace) != namespace:
            continue
        if "pod" in labels:
            of_one = by_pod.get(labels["pod"])
        else:
            of_one = by_address.get(labels.get("instance", ""))
        if of_one is not None:
            of_one.append(series)
    scrapes, ends_s = [], []
    for source in sources:
        at_s, counters = _latest(by_pod[source.name])
        if counters is not None and source.ready:
            # One that ends, or has not begun, may lag behind: nobody waits for it.
            ends_s.append(at_s)
        signal = Signal.MISSING if counters is None else Signal.FRESH
        detail = "" if counters else f"Prometheus has no numbers of {source.name}"
        scrapes.append(RouterScrape(source=source, signal=signal, counters=counters, detail=detail))
    return round(min(ends_s, default=0) * NS_PER_S), tuple(scrapes)


def _latest(series: Sequence[_Series]) -> tuple[float, RouterCounters | None]:
    """When a router was last scraped, and what it had counted then; None: it is not told."""
    at_s = max((one.values[-1][0] for one in series), default=0.0)
    sums = _Sums()
    for one in series:
        taken_s, text = one.values[-1]
        if taken_s == at_s:
            sums.take(one.metric, _count(text))
    return at_s, sums.counters()


def _series(body: bytes) -> Iterable[_Series]:
    try:
        return decoded(_ANSWER, body).data.result
    except ValueError as error:
        # What the decoder says may quote the answer, and whoever named the server would read it.
        raise ValueError("not an answer to the query") from error


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _MOST:  # nor NaN
        raise ValueError("not a count in the answer")
    return round(value)
