"""Parts of the router without sockets: retries, replicas, the list of upstreams, timings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from goodput_core.contract import METRIC_ROUTER_RETRIES
from goodput_core.errors import InputError, UsageError
from goodput_core.placement import PlacementReason
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_S
from goodput_engine.router.outcomes import OutcomeCounts
from goodput_engine.router.proxied_request import Timings, read_timings
from goodput_engine.router.replicas import EngineReport, ReplicaPool
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.upstream_client import RetryReason
from goodput_engine.router.upstreams import (
    Upstream,
    UpstreamsFile,
    merge,
    parse_upstream,
    parse_upstreams,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@given(
    percent=st.integers(0, 100),
    burst=st.integers(0, 20),
    events=st.lists(st.booleans(), max_size=300),
)
def test_retries_never_exceed_their_budget(percent: int, burst: int, events: list[bool]) -> None:
    budget = RetryBudget(percent=percent, burst=burst)
    requests = retries = 0
    for wants_retry in events:
        if wants_retry:
            retries += budget.spend()
        else:
            requests += 1
            budget.earn()
        assert retries * 100 <= burst * 100 + requests * percent


def test_an_idle_router_may_retry_its_burst() -> None:
    budget = RetryBudget(percent=10, burst=3)
    assert [budget.spend() for _ in range(5)] == [True, True, True, False, False]
    for _ in range(10):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]


A = Upstream("a", "http://127.0.0.1:1")
B = Upstream("b", "http://127.0.0.1:2")


def ready_replicas(*upstreams: Upstream) -> ReplicaPool:
    replicas = ReplicaPool(RouterPolicy.LEAST_LOADED)
    replicas.set_upstreams(upstreams)
    for replica in replicas:
        replica.mark_ready()
    return replicas


async def test_a_replica_with_a_full_queue_gets_no_request_until_one_ends() -> None:
    replicas = ready_replicas(A)
    (a,) = replicas
    a.begin("a request", lambda: None)
    a.take_report(EngineReport(waiting=4, max_waiting=4), 0, valid_ns=10)
    assert replicas.place(5)[1].reason is PlacementReason.ALL_SATURATED
    a.end("a request", served=True)
    assert replicas.place(5)[0] is a


async def test_saturation_expires() -> None:
    replicas = ready_replicas(A)
    (a,) = replicas
    a.mark_saturated(0)
    assert replicas.place(1)[0] is None
    assert replicas.place(NS_PER_S)[0] is a


@pytest.mark.parametrize(
    ("report", "full"),
    [
        (EngineReport(), False),
        (EngineReport(waiting=9), False),
        (EngineReport(waiting=3, max_waiting=4), False),
        (EngineReport(waiting=4, max_waiting=4), True),
        (EngineReport(waiting=0, max_waiting=0), False),
        (EngineReport(waiting=4, max_waiting=4, saturated=False), False),
        (EngineReport(saturated=True), True),
    ],
)
def test_the_reported_saturation_overrides_the_queue(report: EngineReport, full: bool) -> None:
    assert report.full is full


async def test_a_draining_replica_gets_no_new_requests() -> None:
    replicas = ready_replicas(A, B)
    a, b = replicas
    a.take_report(EngineReport(draining=True), 0, valid_ns=1)
    assert not a.ready
    assert {replicas.place(0)[0] for _ in range(4)} == {b}


async def test_a_new_list_keeps_the_unchanged_replicas() -> None:
    replicas = ready_replicas(A, B)
    a, b = replicas
    moved = Upstream("b", "http://127.0.0.1:3")
    added, removed = replicas.set_upstreams([A, moved])
    kept, new = replicas
    assert kept is a
    assert list(removed) == [b]
    assert list(added) == [new]
    assert not new.ready


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "input.json"),
        (b"{}", "array"),
        (b"[{}]", "name"),
        (b'[{"name":"a","url":"http://h:1","typo":1}]', "typo"),
        (b'[{"name":"","url":"http://h:1"}]', "[0].name"),
        (b'[{"name":"a","url":"h:1"}]', "[0].url"),
        (b'[{"name":"a","url":"ftp://h"}]', "[0].url"),
        (b'[{"name":"a","url":"http://h:99999"}]', "[0].url"),
        (b'[{"name":"a","url":"http://h/v1"}]', "[0].url"),
        (b'[{"name":"a","url":"http://h","admin_url":"x"}]', "[0].admin_url"),
        (b'[{"name":"a","url":"http://h"},{"name":"a","url":"http://h"}]', "twice"),
        (b"\xff\xfe", "input.json"),
        (b'"' + b"x" * (2 << 20) + b'"', "MiB"),
    ],
)
def test_an_invalid_list_of_upstreams_is_reported_by_file_and_field(
    data: bytes, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        parse_upstreams(data, source="input.json")
    assert problem in str(caught.value)
    assert str(caught.value).startswith("input.json: ")


def test_an_empty_list_is_valid() -> None:
    assert parse_upstreams(b"[]", source="x") == ()


def test_an_option_names_a_replica() -> None:
    assert parse_upstream("r0=http://h:1,http://h:2") == Upstream("r0", "http://h:1", "http://h:2")
    assert parse_upstream("r0=http://h:1").admin_url is None
    for text in ("", "r0", "=http://h", "r0=", "r0=nope"):
        with pytest.raises(ValueError, match=r"upstream|NAME=URL"):
            parse_upstream(text)


def test_a_name_is_unique_in_file_and_options() -> None:
    with pytest.raises(UsageError, match="taken"):
        merge([A], [A])


def publish(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def test_the_file_is_read_again_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "upstreams.json"
    publish(path, '[{"name":"a","url":"http://h:1"}]')
    file = UpstreamsFile(path)
    seen: list[Sequence[Upstream]] = []
    assert [u.name for u in file.read()] == ["a"]
    file.poll(seen.append)
    assert seen == []
    publish(path, '[{"name":"b","url":"http://h:1"}]')
    file.poll(seen.append)
    file.poll(seen.append)
    assert [[u.name for u in found] for found in seen] == [["b"]]


@pytest.mark.parametrize("bad", ["", "[{", '[{"name":"a"}]'])
def test_invalid_content_keeps_the_last_valid_list_and_is_logged_once(
    tmp_path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "upstreams.json"
    publish(path, '[{"name":"a","url":"http://h:1"}]')
    file = UpstreamsFile(path)
    file.read()
    seen: list[Sequence[Upstream]] = []
    publish(path, bad)
    file.poll(seen.append)
    file.poll(seen.append)
    assert seen == []
    assert [r.message for r in caplog.records] == ["upstreams file not applied"]
    publish(path, '[{"name":"b","url":"http://h:1"}]')
    file.poll(seen.append)
    assert len(seen) == 1


def test_a_file_that_is_removed_and_written_again_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "upstreams.json"
    publish(path, "[]")
    file = UpstreamsFile(path)
    file.read()
    seen: list[Sequence[Upstream]] = []
    path.unlink()
    file.poll(seen.append)
    file.poll(seen.append)
    assert [r.message for r in caplog.records] == ["upstreams file not applied"]
    publish(path, "[]")
    os.utime(path, ns=(1, 1))
    file.poll(seen.append)
    assert seen == [()]


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(InputError, match="no-such"):
        UpstreamsFile(Path("no-such.json")).read()


@pytest.mark.parametrize(
    ("text", "timings"),
    [
        (None, None),
        ("", None),
        ("nonsense", None),
        ('{"ttft_ms":-1}', None),
        ('{"ttft_ms":"x"}', None),
        ('{"ttft_ms":1e300}', None),
        ('{"ttft_ms":1.5,"tpot_ms":null,"queue_ms":1}', Timings(ttft_ms=1.5)),
    ],
)
def test_invalid_timings_are_ignored(text: str | None, timings: Timings | None) -> None:
    assert read_timings(text) == timings


async def test_changes_of_the_list_are_published(tmp_path: Path) -> None:
    path = tmp_path / "upstreams.json"
    publish(path, "[]")
    file = UpstreamsFile(path, interval_ns=1_000_000)
    assert await file.first() == ()
    published = asyncio.Event()
    task = asyncio.create_task(file.follow(lambda _found: published.set()))
    publish(path, '[{"name":"b","url":"http://h:1"}]')
    await asyncio.wait_for(published.wait(), 5)
    task.cancel()


def test_every_reason_of_a_retry_has_a_series_before_the_first_retry() -> None:
    """Prometheus's `rate` does not see the first increment of a series that begins with it."""
    registry = CollectorRegistry()
    outcomes = OutcomeCounts(registry, llmservice="chat", classes=["chat"])

    def retries() -> dict[str, float]:
        found = {family.name: family for family in registry.collect()}
        samples = found[METRIC_ROUTER_RETRIES.removesuffix("_total")].samples
        return {one.labels["reason"]: one.value for one in samples}

    assert retries() == dict.fromkeys(RetryReason, 0)
    outcomes.count_retry(RetryReason.LOST)
    assert retries() == {**dict.fromkeys(RetryReason, 0), RetryReason.LOST: 1}
