"""Panels show the metrics of other servers than Goodput's engine beside those of our engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.monitoring.programs import inserted, run_promtool
from tools.monitoring.panels import SERVICE

if TYPE_CHECKING:
    from pathlib import Path

PANELS = {panel.title: panel for row in SERVICE.rows for panel in row.panels}
LABELS = 'namespace="prod",llmservice="chat"'
LOADS = {
    "goodput": [
        'goodput_engine_running_requests{%s,revision="r"} 3',
        'goodput_engine_waiting_requests{%s,revision="r"} 2',
        'goodput_engine_kv_blocks{%s,state="used"} 5',
        'goodput_engine_kv_blocks{%s,state="free"} 15',
        "goodput_engine_preemptions_total{%s} 0+60x10",
        "goodput_engine_output_tokens_total{%s} 0+600x10",
    ],
    "vllm": [
        # Two engines of one server: data parallelism.
        'vllm:num_requests_running{%s,engine="0"} 1',
        'vllm:num_requests_running{%s,engine="1"} 2',
        'vllm:num_requests_waiting{%s,engine="0"} 2',
        'vllm:kv_cache_usage_perc{%s,engine="0"} 0.2',
        'vllm:kv_cache_usage_perc{%s,engine="1"} 0.3',
        "vllm:num_preemptions_total{%s} 0+60x10",
        "vllm:generation_tokens_total{%s} 0+600x10",
    ],
    "sglang": [
        # Two ranks of tensor parallelism publish the same numbers; by default, only those of the
        # counter of retractions.
        'sglang:num_running_reqs{%s,tp_rank="0"} 3',
        'sglang:num_running_reqs{%s,tp_rank="1"} 3',
        'sglang:num_queue_reqs{%s,tp_rank="0"} 2',
        'sglang:token_usage{%s,tp_rank="0"} 0.25',
        'sglang:num_retracted_requests_total{%s,tp_rank="0"} 0+60x10',
        'sglang:num_retracted_requests_total{%s,tp_rank="1"} 0+60x10',
        "sglang:generation_tokens_total{%s} 0+600x10",
    ],
}
"""Series of one engine of each kind with the same load, in steps of a minute."""
EXPECTED: dict[str, list[tuple[str, float]]] = {
    # Queries of each panel: the label by which they are grouped, and the value of one engine.
    "Queue": [("", 3), ("", 2)],
    "KV cache": [("pod", 0.25)],
    "Preemptions": [("pod", 1)],
    "Output tokens of the pair": [("role", 10)],
    "Queue of the pair": [("role", 3), ("role", 2)],
    "KV cache of the pair": [("role", 0.25)],
}


def loads(server: str, pod: str, role: str) -> list[dict[str, str]]:
    labels = f'{LABELS},pod="{pod}",role="{role}"'
    found = []
    for line in LOADS[server]:
        series, _, values = (line % labels).rpartition(" ")
        found.append({"series": series, "values": values if "x" in values else f"{values}x10"})
    return found


@pytest.mark.parametrize("other", ["vllm", "sglang"])
def test_two_kinds_of_engines_are_added_up_or_shown_beside_each_other(
    other: str, tmp_path: Path
) -> None:
    series = [
        *loads("goodput", "chat-0", "engine"),
        *loads(other, "chat-1", "engine"),
        *loads("goodput", "chat-b", "baseline"),
        *loads(other, "chat-c", "candidate"),
    ]
    by = {
        "": ("{}",),
        "pod": ('{pod="chat-0"}', '{pod="chat-1"}'),
        "role": ('{role="baseline"}', '{role="candidate"}'),
    }
    checks: list[dict[str, Any]] = []
    for title, expected in EXPECTED.items():
        for query, (label, value) in zip(PANELS[title].queries, expected, strict=False):
            # Ungrouped, the two engines are added up.
            shown = value if label else 2 * value
            samples = [{"labels": labels, "value": shown} for labels in by[label]]
            checks.append({"expr": inserted(query.expr), "eval_time": "8m", "exp_samples": samples})
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"tests": [test]}), encoding="utf-8")
    run_promtool("test", "rules", str(path))
