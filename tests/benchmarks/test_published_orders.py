"""The command of the published orders gives the orders that the papers publish."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.published_orders import EXAMPLES, main


def column(rows: list[dict[str, Any]], name: str, *, by: str) -> dict[Any, Any]:
    return {row[by]: row[name] for row in rows}


def run(example: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    main(["--examples", example, "--quick", "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)[example]
    return rows


def test_iteration_level_scheduling_beats_batches_that_run_to_their_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = column(run("batching", capsys), "tokens/s", by="policy")
    assert max(rates["request"], rates["static"]) < min(rates["orca"], rates["vllm"])
    assert rates["orca"] > 1.5 * rates["static"]


def test_the_less_is_reserved_the_higher_the_throughput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run("reservation", capsys)
    assert [row["reservation"] for row in rows] == [
        "orca, Max",
        "orca, Pow2",
        "orca, Oracle",
        "vllm",
    ]
    rates = [row["tokens/s"] for row in rows]
    assert rates == sorted(set(rates))
    assert rates[-1] > 2 * rates[0]


def test_chunked_prompts_do_not_stall_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    gaps = column(run("stalls", capsys), "longest gap, ms", by="policy")
    assert max(gaps["sarathi"], gaps["splitfuse"]) < min(gaps["orca"], gaps["vllm"]) / 5


def test_a_small_prefill_chunk_lets_short_prompts_pass_a_long_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run("chunks", capsys)
    by = "prefillChunkTokens"
    short, long = (
        column(rows, f"TTFT, {kind}, ms", by=by) for kind in ("short prompts", "long prompt")
    )
    assert short[512] < short["none"] / 2
    assert long["none"] < long[512]


def test_swapping_beats_recomputation_on_a_fast_link_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run("swapping", capsys)
    recompute, swap = (
        list(column(rows, f"{mode}, s", by="GB/s").values()) for mode in ("recompute", "swap")
    )
    assert len(set(recompute)) == 1
    assert swap == sorted(swap, reverse=True)
    assert swap[-1] < recompute[0] < swap[0]


def test_a_feedback_queue_lowers_the_mean_latency_without_knowing_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run("feedback", capsys)
    for name in ("mean latency, s", "of short outputs, s"):
        latency = column(rows, name, by="policy")
        assert latency["fastserve"] < min(latency["vllm"], latency["sarathi"])


def test_slower_ageing_keeps_more_urgent_and_fewer_background_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run("ageing", capsys)
    urgent = [row["urgent kept"] for row in rows]
    background = [row["background kept"] for row in rows]
    assert urgent == sorted(urgent)
    assert urgent[0] < urgent[1] < urgent[2] < urgent[3]
    assert background == sorted(background, reverse=True)
    assert background[0] > background[-1]


@pytest.mark.slow
def test_a_small_least_budget_holds_the_tbt_target(capsys: pytest.CaptureFixture[str]) -> None:
    over = column(run("minima", capsys), "gaps over 100 ms", by="tokenBudget.min")
    assert over[64] == "0.0%"
    assert over[256] != "0.0%"


def test_an_unknown_example_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--examples", "stall"])
    assert f"'stall' is not one of {', '.join(EXAMPLES)}" in capsys.readouterr().err
