"""Metrics pages of several servers become the same series."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from goodput_core.server_metrics import PageError
from goodput_core.units import NS_PER_S
from goodput_replay.scraping.page_series import PageSeries, is_router, read_page

# The names of vLLM and SGLang are those of their documentation.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 12.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 5.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-8B"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-8B"} 0.25
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen3-8B"} %(preemptions)d
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} %(prompt)d
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} %(output)d.0
vllm:iteration_tokens_total_bucket{le="1.0"} 7
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 15
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 5
sglang:token_usage{model_name="m",tp_rank="0"} 0.375
sglang:num_retracted_requests_total{model_name="m"} %(preemptions)d
sglang:prompt_tokens_total{model_name="m"} %(prompt)d
sglang:generation_tokens_total{model_name="m"} %(output)d
"""
GOODPUT = """\
goodput_engine_running_requests{llmservice="chat",revision="",role="engine"} 15.0
goodput_engine_waiting_requests{llmservice="chat",revision="",role="engine"} 5.0
goodput_engine_kv_blocks{llmservice="chat",state="used"} 375.0
goodput_engine_kv_blocks{llmservice="chat",state="cached"} 600.0
goodput_engine_kv_blocks{llmservice="chat",state="empty"} 25.0
goodput_engine_preemptions_total{llmservice="chat"} %(preemptions)d
goodput_engine_output_tokens_total{llmservice="chat"} %(output)d
"""
EXPECTED = {
    "running_requests": 15.0,
    "waiting_requests": 5.0,
    "kv_usage": 0.375,
    "preemptions": 0.5,
    "prompt_tokens": 2000.0,
    "output_tokens": 100.0,
}


@pytest.mark.parametrize("page", [VLLM, SGLANG, GOODPUT], ids=["vLLM", "SGLang", "Goodput"])
def test_every_known_server_has_the_same_series(page: str) -> None:
    expected = dict(EXPECTED)
    if page is GOODPUT:
        del expected["prompt_tokens"]
    series = PageSeries()
    before = {"preemptions": 7, "prompt": 1_000_000, "output": 500}
    after = {"preemptions": 8, "prompt": 1_004_000, "output": 700}
    first = series.update(0, read_page((page % before).encode(), ()))
    second = series.update(2 * NS_PER_S, read_page((page % after).encode(), ()))
    levels = {"running_requests", "waiting_requests", "kv_usage"}
    assert first == {name: expected[name] for name in levels}, "a rate needs two scrapes"
    assert second == expected


def test_the_current_name_of_a_metric_is_preferred_to_a_former_one() -> None:
    page = b"vllm:gpu_cache_usage_perc 0.1\nvllm:kv_cache_usage_perc 0.9\n"
    assert PageSeries().update(0, read_page(page, ())) == {"kv_usage": 0.9}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
@pytest.mark.parametrize("metric", ["vllm:num_requests_running", "vllm:prompt_tokens_total"])
def test_a_value_that_is_not_finite_leaves_a_gap(metric: str, value: str) -> None:
    series = PageSeries()
    pages = [f'{metric}{{a="1"}} {v}\n{metric}{{a="2"}} 4\n' for v in ("2", value, "6")]
    values = [
        series.update(at * NS_PER_S, read_page(page.encode(), ())) for at, page in enumerate(pages)
    ]
    assert values[1] == {}
    # The rate after the gap is over the complete time since the last value.
    assert values[2] in ({"running_requests": 10.0}, {"prompt_tokens": 2.0})


def test_a_sum_that_is_not_finite_leaves_a_gap() -> None:
    page = b'vllm:num_requests_running{a="1"} 1e308\nvllm:num_requests_running{a="2"} 1e308\n'
    assert PageSeries().update(0, read_page(page, ())) == {}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 100),
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000), max_size=3),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_rates_are_the_increases_of_each_counter_despite_resets(
    scrapes: list[tuple[int, dict[str, int]]],
) -> None:
    series = PageSeries()
    at_s, found = 0, []
    for seconds, counters in scrapes:
        at_s += seconds
        lines = [f'vllm:prompt_tokens_total{{engine="{e}"}} {v}' for e, v in counters.items()]
        samples = read_page("\n".join(lines).encode(), ())
        found.append((at_s, counters, series.update(at_s * NS_PER_S, samples)))
    # A scrape without the metric is as if it had not been made.
    made = [one for one in found if one[1]]
    for (before_s, before, _), (now_s, now, values) in pairwise(made):
        both = before.keys() & now.keys()
        if not both:
            assert values == {}
            continue
        increase = sum(now[e] - before[e] if now[e] >= before[e] else now[e] for e in both)
        assert values["prompt_tokens"] == pytest.approx(increase / (now_s - before_s))


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=40),
        st.floats(0, 1e9),
        min_size=1,
        max_size=5,
    )
)
def test_a_page_of_the_client_library_is_read_whatever_its_labels(
    values: dict[str, float],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:num_requests_running", "Requests.", ["model_name"], registry=registry)
    counter = Counter("mine", "Mine.", ["model_name"], registry=registry)
    for label, value in values.items():
        gauge.labels(label).set(value)
        counter.labels(label).inc(value)
    samples = read_page(generate_latest(registry), ("mine_total",))
    for name in ("vllm:num_requests_running", "mine_total"):
        assert {dict(labels)["model_name"]: v for labels, v in samples[name].items()} == (
            pytest.approx(values)
        )


def test_a_repeated_sample_is_counted_once() -> None:
    page = b'vllm:num_requests_running{a="1",b="2"} 3\nvllm:num_requests_running{b="2",a="1"} 4\n'
    assert PageSeries().update(0, read_page(page, ())) == {"running_requests": 4.0}


def test_timestamps_exemplars_blanks_and_windows_line_ends_are_allowed() -> None:
    page = (
        b"# TYPE vllm:prompt_tokens counter\r\n"
        b'  vllm:prompt_tokens_total{a="1"} 5 1700000000000\r\n'
        b'vllm:generation_tokens_total{a="# }{ 1"} 7.0 # {trace_id="x y"} 1.0 1700000000.123\r\n'
        b"\tvllm:num_requests_waiting\t2\r\n"
        b"# EOF\r\n"
    )
    samples = read_page(page, ())
    assert {name: list(one.values()) for name, one in samples.items()} == {
        "vllm:prompt_tokens_total": [5.0],
        "vllm:generation_tokens_total": [7.0],
        "vllm:num_requests_waiting": [2.0],
    }


def test_metrics_that_the_user_names_are_levels_or_rates_by_their_ending() -> None:
    series = PageSeries(("queue", "work_total"))
    for at, (queue, work) in enumerate(((3, 10), (4, 25))):
        page = f'queue{{a="1"}} {queue}\nqueue{{a="2"}} 1\nqueue_other 9\nwork_total {work}\n'
        samples = read_page(page.encode(), ("queue", "work_total"))
        values = series.update(at * NS_PER_S, samples)
    assert values == {"queue": 5.0, "work_total": 15.0}


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (b"vllm:num_requests_running{a=1} 1\n", "not Prometheus text"),
        (b"vllm:num_requests_running one\n", "not Prometheus text"),
        (b'vllm:num_requests_running{a="1" 1\n', "not Prometheus text"),
        (b'vllm:num_requests_running{a="1",a="2"} 1\n', "not Prometheus text"),
        (b'vllm:num_requests_running{a="\xff"} 1\n', "not Prometheus text"),
        (b"vllm:num_requests_running " + b"9" * 1900 + b"\n", "not Prometheus text"),
        (b'vllm:num_requests_running{a="' + b"x" * 3000 + b'"} 1\n', "too many labels"),
        (b"vllm:num_requests_running{" + b'a="1",' * 100 + b"} 1\n", "too many labels"),
        (
            b"".join(b'vllm:num_requests_running{a="%d"} 1\n' % i for i in range(1001)),
            "more than 1000 samples",
        ),
    ],
    ids=["label", "value", "brace", "twice", "UTF-8", "huge", "long", "labels", "samples"],
)  # fmt: skip
def test_an_invalid_line_of_a_recorded_metric_is_a_sentence(page: bytes, problem: str) -> None:
    with pytest.raises(PageError, match=problem):
        read_page(page, ())


@given(st.binary(max_size=300))
def test_any_bytes_after_a_metric_are_values_or_a_sentence(tail: bytes) -> None:
    try:
        samples = read_page(b"vllm:num_requests_running" + tail, ())
        values = PageSeries().update(0, samples)
    except PageError:
        return
    assert all(map(math.isfinite, values.values()))


def test_invalid_lines_of_other_metrics_do_not_matter() -> None:
    page = b'other{a=" 1\n\xff\xfe\nvllm:num_requests_running 1\n<html>\n'
    assert PageSeries().update(0, read_page(page, ())) == {"running_requests": 1.0}


def test_a_long_page_of_other_metrics_costs_little() -> None:
    lines = b"".join(b'other_metric{label="value",n="%d"} 1.0\n' % i for i in range(200_000))
    page = lines[: 8 << 20] + b"\nvllm:num_requests_running 1\n" + b"x" * (1 << 20)
    began = time.process_time()
    assert is_router(read_page(page, ())) is False
    assert time.process_time() - began < 2


def test_the_page_of_a_router_is_recognised() -> None:
    assert is_router(read_page(b'goodput_router_in_flight_requests{role="router"} 0.0\n', ()))
