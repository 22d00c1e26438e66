"""Readings of other servers over real sockets, from pages that are good, old, wrong or endless."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from aiohttp.test_utils import TestServer
from tools.e2e.emulated_vllm import EmulatedVllm

from goodput_core.control import Signal
from goodput_core.histogram import LengthBin
from goodput_operator.control.admin_ports import Scraper, session_for_pods
from goodput_operator.control.measures import measure_interval
from goodput_operator.control.pod_measures import engine_targets
from goodput_operator.control.readings import (
    EngineScrape,
    RouterCounters,
    Scrape,
    ScrapeTarget,
    ServiceReading,
)
from goodput_operator.control.server_pages import decode_server
from goodput_operator.kube.objects import metrics_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 7.0
vllm:num_requests_running{engine="1",model_name="chat"} 4.0
vllm:num_requests_waiting{engine="0",model_name="chat"} 2.0
vllm:num_requests_waiting{engine="1",model_name="chat"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="chat"} 0.3
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1.0
vllm:num_preemptions_total{engine="0",model_name="chat"} 3.0
vllm:request_prompt_tokens_sum{engine="0",model_name="chat"} 900.0
vllm:request_prompt_tokens_count{engine="0",model_name="chat"} 3.0
vllm:request_generation_tokens_sum{engine="0",model_name="chat"} 60.0
vllm:prefix_cache_hits_total{engine="0",model_name="chat"} 100.0
"""
SGLANG = b"""\
sglang:num_running_reqs{model_name="chat"} 5.0
sglang:num_queue_reqs{model_name="chat"} 1.0
sglang:token_usage{model_name="chat"} 0.25
sglang:max_total_num_tokens{model_name="chat"} 4000.0
sglang:num_retracted_requests_total{model_name="chat"} 2.0
sglang:prompt_tokens_total{model_name="chat"} 1000.0
sglang:generation_tokens_total{model_name="chat"} 200.0
sglang:num_requests_total{model_name="chat"} 4.0
"""


def test_the_engines_of_one_vllm_are_summed() -> None:
    counters = decode_server(VLLM)
    state = counters.state
    assert (state.running, state.waiting, state.preemptions) == (11, 2, 3)
    assert (state.kv_total_blocks, state.kv_free_blocks, state.block_size) == (1000, 600, 16)
    assert counters.lengths == (
        LengthBin(requests=3, input_tokens=900, cached_tokens=100, output_tokens=60),
    )


def test_sglang_is_read_by_its_own_names() -> None:
    counters = decode_server(SGLANG)
    state = counters.state
    assert (state.running, state.waiting, state.preemptions) == (5, 1, 2)
    assert (state.kv_total_blocks, state.kv_free_blocks, state.block_size) == (4000, 3000, 1)
    assert counters.lengths == (
        LengthBin(requests=4, input_tokens=1000, cached_tokens=0, output_tokens=200),
    )


# An earlier version: no size of the cache, and only a gauge of the last retractions.
OLD_SGLANG = b"""\
sglang:num_running_reqs{model_name="chat"} 5.0
sglang:num_used_tokens{model_name="chat"} 1000.0
sglang:token_usage{model_name="chat"} 0.25
sglang:num_queue_reqs{model_name="chat"} 1.0
sglang:num_retracted_reqs{model_name="chat"} 2.0
sglang:prompt_tokens_total{model_name="chat"} 1000.0
sglang:generation_tokens_total{model_name="chat"} 200.0
sglang:cached_tokens_total{model_name="chat"} 64.0
sglang:num_requests_total{model_name="chat"} 4.0
"""
# A later version with priority scheduling: the total of the priorities beside each of them.
NEW_SGLANG = b"""\
sglang:num_running_reqs{model_name="chat",priority=""} 5.0
sglang:num_running_reqs{model_name="chat",priority="0"} 4.0
sglang:num_running_reqs{model_name="chat",priority="7"} 1.0
sglang:num_queue_reqs{model_name="chat",priority=""} 1.0
sglang:num_queue_reqs{model_name="chat",priority="0"} 1.0
sglang:num_grammar_queue_reqs{model_name="chat",priority=""} 3.0
sglang:token_usage{model_name="chat",priority=""} 0.25
sglang:full_token_usage{model_name="chat",priority=""} 0.3
sglang:max_total_num_tokens{model_name="chat",priority=""} 4000.0
sglang:num_retracted_reqs{model_name="chat",priority=""} 9.0
sglang:num_retracted_requests_total{model_name="chat",priority=""} 2.0
sglang:prompt_tokens_total{model_name="chat",priority="0"} 700.0
sglang:prompt_tokens_total{model_name="chat",priority="7"} 300.0
sglang:generation_tokens_total{model_name="chat",priority="0"} 150.0
sglang:generation_tokens_total{model_name="chat",priority="7"} 50.0
sglang:cached_tokens_total{model_name="chat",priority="0",cache_source="device"} 40.0
sglang:cached_tokens_total{model_name="chat",priority="7",cache_source="host"} 24.0
sglang:num_requests_total{model_name="chat",priority="0"} 3.0
sglang:num_requests_total{model_name="chat",priority="7"} 1.0
"""


@pytest.mark.parametrize(
    ("page", "preemptions", "blocks", "unknown"),
    [
        pytest.param(OLD_SGLANG, 0, (0, 0), {"preemptions"}, id="older"),
        pytest.param(NEW_SGLANG, 2, (4000, 3000), set(), id="newer"),
    ],
)
def test_another_version_of_sglang_is_read(
    page: bytes, preemptions: int, blocks: tuple[int, int], unknown: set[str]
) -> None:
    counters = decode_server(page)
    state = counters.state
    assert (state.running, state.waiting, state.output_tokens) == (5, 1, 200)
    assert state.preemptions == preemptions
    assert counters.unknown == unknown
    assert (state.kv_total_blocks, state.kv_free_blocks) == blocks
    assert counters.lengths == (
        LengthBin(requests=4, input_tokens=1000, cached_tokens=64, output_tokens=200),
    )


def test_the_totals_of_priorities_are_added_for_each_engine() -> None:
    both = b"".join(
        NEW_SGLANG.replace(b'model_name="chat"', b'model_name="chat",dp_rank="%d"' % rank)
        for rank in (0, 1)
    )
    state = decode_server(both).state
    assert (state.running, state.waiting, state.kv_total_blocks) == (10, 2, 8000)
    # A version without a total has the numbers of each priority alone.
    alone = b"".join(
        line + b"\n"
        for line in NEW_SGLANG.splitlines()
        if b'_reqs{model_name="chat",priority=""' not in line
    )
    state = decode_server(alone).state
    assert (state.running, state.waiting) == (5, 1)


RANKED = (b"_reqs{", b"token_usage{", b"total_num_tokens{", b"retracted_requests_total{")
"""Metrics of SGLang's schedulers, which have the labels of their ranks."""


def ranked(page: bytes, *ranks: bytes) -> bytes:
    """Return the page of a server whose schedulers of these ranks publish the same numbers."""
    lines = []
    for line in page.splitlines(keepends=True):
        of_scheduler = any(name in line for name in RANKED)
        labels = ranks if of_scheduler else (b"",)
        lines += [line.replace(b"{", b"{" + rank, 1) for rank in labels]
    return b"".join(lines)


@pytest.mark.parametrize(
    "ranks",
    [
        (b'tp_rank="0",pp_rank="0",moe_ep_rank="0",', b'tp_rank="1",pp_rank="0",moe_ep_rank="1",'),
        (b'tp_rank="0",pp_rank="0",', b'tp_rank="0",pp_rank="1",'),
    ],
    ids=["tensor", "pipeline"],
)
def test_ranks_that_share_their_requests_are_counted_once(ranks: tuple[bytes, ...]) -> None:
    assert decode_server(ranked(SGLANG, *ranks)).state == decode_server(SGLANG).state


def test_a_rank_that_is_behind_the_others_does_not_count() -> None:
    page = ranked(SGLANG, b'tp_rank="0",') + ranked(
        SGLANG.replace(b'_total{model_name="chat"} 2.0', b'_total{model_name="chat"} 1.0'),
        b'tp_rank="1",',
    )
    assert decode_server(page).state.preemptions == 2
    # Without a usable number of one rank, the sum is unknown.
    with pytest.raises(ValueError, match="no known metrics of running"):
        decode_server(page + b'sglang:num_running_reqs{model_name="chat",tp_rank="2"} NaN\n')


def test_ranks_with_requests_of_their_own_are_added() -> None:
    # Attention of data parallelism: each rank of tensor parallelism has a rank of its own.
    own = [b'tp_rank="%d",dp_rank="%d",' % (rank, rank) for rank in (0, 1)]
    state = decode_server(ranked(SGLANG, *own)).state
    assert (state.running, state.waiting, state.preemptions) == (10, 2, 4)
    assert (state.kv_total_blocks, state.kv_free_blocks) == (8000, 6000)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
            + b'vllm:num_requests_swapped{model_name="chat"} 9.0\n'
            + b'vllm:cpu_cache_usage_perc{model_name="chat"} 0.9\n',
            id="0.8",
        ),
        pytest.param(
            VLLM
            + b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\n'
            + b'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 0.0\n',
            id="later",
        ),
    ],
)
def test_another_version_of_vllm_is_read(page: bytes) -> None:
    assert decode_server(page).state == decode_server(VLLM).state


def test_the_caches_of_data_parallel_engines_are_summed() -> None:
    second = VLLM.replace(b'num_gpu_blocks="1000",engine="0"', b'num_gpu_blocks="600",engine="1"')
    line = next(line for line in second.splitlines() if b"cache_config_info" in line)
    state = decode_server(VLLM + line + b"\n").state
    assert (state.kv_total_blocks, state.kv_free_blocks) == (1600, 960)


def test_counters_that_a_version_does_not_publish_are_unknown() -> None:
    assert decode_server(VLLM).unknown == {"output_tokens"}
    page = VLLM + b'vllm:generation_tokens_total{engine="0",model_name="chat"} 60.0\n'
    assert not decode_server(page).unknown
    page = page.replace(b"num_preemptions", b"of_another_version")
    assert decode_server(page).unknown == {"preemptions"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        (b"vllm:kv_cache_usage_perc", b"vllm:of_another_version"),
        (b"num_gpu_blocks", b"of_another_version"),
    ],
    ids=["0.9", "no usage", "no blocks"],
)
def test_what_a_version_does_not_publish_is_unknown(before: bytes, after: bytes) -> None:
    state = decode_server(VLLM.replace(before, after)).state
    assert (state.running, state.waiting) == (11, 2)
    known = after == b"vllm:gpu_cache_usage_perc"
    assert (state.kv_total_blocks, state.kv_free_blocks) == ((1000, 600) if known else (0, 0))


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html></html>",
        b"process_cpu_seconds_total 1.0\n",
        VLLM.replace(b"num_requests_waiting", b"of_another_version"),
        VLLM.replace(b" 7.0", b" NaN"),
        VLLM.replace(b" 7.0", b" -7.0").replace(b" 4.0", b" 1.0"),
        VLLM.replace(b" 7.0", b" +Inf"),
        VLLM.replace(b" 7.0", b" 1e300"),
        VLLM.replace(b" 7.0", b" seven"),
        b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % n for n in range(2000)),
    ],
    ids=["empty", "html", "others", "half", "nan", "minus", "inf", "giant", "text", "many"],
)
def test_an_unusable_page_is_no_reading_and_never_zero(page: bytes) -> None:
    with pytest.raises(ValueError, match="its page has"):
        decode_server(page)


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    async with session_for_pods() as session:
        yield Scraper(session, total_s=0.5)


@pytest.mark.parametrize(
    ("metrics", "signal"),
    [
        ("", Signal.FRESH),
        ("old", Signal.FRESH),
        ("missing", Signal.FAILED),
        ("slow", Signal.FAILED),
        ("huge", Signal.FAILED),
    ],
)
async def test_a_page_is_bounded_in_size_and_time(
    scraper: Scraper, metrics: str, signal: Signal
) -> None:
    async with AsyncExitStack() as stack:
        runner = TestServer(EmulatedVllm("chat", 4, metrics).app())
        await stack.enter_async_context(runner)
        url = str(runner.make_url("/metrics"))
        target = ScrapeTarget(name="a", uid="1", url=url, foreign=True)
        async with asyncio.timeout(10):
            (scrape,) = await scraper.engines([target])
    assert scrape.signal is signal
    if scrape.counters is None:
        assert url in scrape.detail
    else:
        assert scrape.counters.state.kv_total_blocks == 1000


async def test_a_server_without_a_page_is_not_asked(scraper: Scraper) -> None:
    (scrape,) = await scraper.engines([ScrapeTarget(name="a", uid="1", url="", foreign=True)])
    assert (scrape.signal, scrape.detail) == (Signal.MISSING, "")


def pod(page: str | None) -> dict[str, object]:
    annotations = {"goodput.dev/runtime": "vLLM"}
    if page is not None:
        annotations["goodput.dev/metrics"] = page
    return {
        "metadata": {
            "name": "chat-1",
            "uid": "1",
            "labels": {"goodput.dev/role": "engine"},
            "annotations": annotations,
        },
        "status": {"podIP": "10.0.0.7"},
    }


@pytest.mark.parametrize(
    ("page", "url"),
    [
        (":8000/metrics", "http://10.0.0.7:8000/metrics"),
        (None, ""),
        ("@elsewhere.example/metrics", ""),
        (":80@elsewhere.example/", ""),
        (":8000", ""),
    ],
)
def test_only_a_port_and_a_path_of_the_pod_are_scraped(page: str | None, url: str) -> None:
    assert metrics_url(pod(page)) == url
    (target,) = engine_targets([pod(page)])
    assert (target.url, target.foreign) == (url, True)


TARGET = ScrapeTarget(name="a", uid="1", url="http://a/metrics", foreign=True)
ROUTER = RouterCounters(
    epoch="r", uptime_ns=1, arrivals=5, client_errors=0, in_flight=0, classes={}
)


def reading(at_ns: int, engine: EngineScrape) -> ServiceReading:
    router = Scrape(
        target=ScrapeTarget(name="r", uid="r", url="http://r"),
        signal=Signal.FRESH,
        counters=ROUTER,
    )
    return ServiceReading(at_ns=at_ns, routers=(router,), engines=(engine,))


def test_finished_requests_are_the_difference_of_two_pages() -> None:
    def scrape(page: bytes) -> EngineScrape:
        return Scrape(target=TARGET, signal=Signal.FRESH, counters=decode_server(page))

    last, _ = measure_interval(None, reading(1, scrape(VLLM)), classes=(), interval_ns=1)
    later = VLLM.replace(b" 900.0", b" 1700.0").replace(b" 60.0", b" 100.0")
    later = later.replace(b'_count{engine="0",model_name="chat"} 3.0', b"_count 5.0")
    last, measures = measure_interval(last, reading(2, scrape(later)), classes=(), interval_ns=1)
    (mix,) = measures.traffic.finished.bins
    assert (mix.requests, mix.input_tokens, mix.output_tokens) == (2, 800, 40)
    assert measures.engines[0].foreign
    assert measures.engines[0].preemptions == 0
    # A restarted server counts from zero again.
    _, measures = measure_interval(last, reading(3, scrape(VLLM)), classes=(), interval_ns=1)
    assert measures.traffic.finished.bins == ()


@pytest.mark.parametrize(("url", "reported"), [("http://a/metrics", 1), ("", 0)])
def test_a_missing_page_is_reported_unless_the_manifest_names_none(url: str, reported: int) -> None:
    scrape: EngineScrape = Scrape(
        target=replace(TARGET, url=url), signal=Signal.MISSING, detail="why"
    )
    _, measures = measure_interval(None, reading(1, scrape), classes=(), interval_ns=1)
    assert len(measures.unmeasured) == reported
