"""Imports of OpenTelemetry spans: conventions of several versions, nesting, order, bad input."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from goodput_traces.format.reader import open_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import CommandResult, RunTrace

    from goodput_traces.format.schema import TraceRow

START_NS = 1_790_341_371_953_418_752


def attribute(key: str, value: object) -> dict[str, Any]:
    kind = {str: "stringValue", bool: "boolValue", float: "doubleValue"}.get(type(value))
    # OTLP's JSON encoding writes 64-bit integers as text.
    return {"key": key, "value": {kind: value} if kind else {"intValue": str(value)}}


def span(at_ms: int, duration_ms: int = 250, name: str = "chat m", **attributes: Any) -> Any:
    start_ns = START_NS + at_ms * 1_000_000
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": f"{at_ms:016x}",
        "name": name,
        "kind": 3,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + duration_ms * 1_000_000),
        "attributes": [
            attribute(key.replace("__", "."), value) for key, value in attributes.items()
        ],
    }


def chat(at_ms: int, tokens: tuple[int, int] = (14, 8), **attributes: Any) -> Any:
    return span(
        at_ms,
        gen_ai__operation__name="chat",
        gen_ai__usage__input_tokens=tokens[0],
        gen_ai__usage__output_tokens=tokens[1],
        **attributes,
    )


def batch(*spans: Any, **resource: object) -> str:
    attributes = [attribute(key.replace("__", "."), value) for key, value in resource.items()]
    value = {
        "resourceSpans": [
            {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}
        ]
    }
    return json.dumps(value) + "\n"


def run(
    tmp_path: Path, run_trace: RunTrace, content: str, *options: str
) -> tuple[CommandResult, list[TraceRow]]:
    path, out = tmp_path / "spans.jsonl", tmp_path / "out.parquet"
    path.write_text(content)
    outcome = run_trace("import", path, "--out", out, "--force", *options)
    return outcome, list(open_trace(out).rows()) if outcome.code == 0 else []


def test_spans_of_the_conventions_become_requests_in_order_of_arrival(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    late = chat(
        900,
        (300, 40),
        gen_ai__request__model="m",
        gen_ai__request__max_tokens=100,
        gen_ai__conversation__id="c-1",
    )
    outcome, rows = run(tmp_path, run_trace, batch(late, chat(100)) + batch(chat(500)))
    assert outcome.code == 0
    assert "in the format otel" in outcome.out
    assert "its rows were sorted" in outcome.err
    assert [row.timestamp_start_unix_ns - START_NS for row in rows] == [
        100_000_000,
        500_000_000,
        900_000_000,
    ]
    last = rows[-1]
    assert (last.input_tokens, last.output_tokens, last.max_output_tokens) == (300, 40, 100)
    assert (last.session_id, last.model_name, last.request_type) == ("c-1", "m", "chat")
    assert last.duration_e2e_ms == 250
    assert len({row.request_id for row in rows}) == 3


def test_spans_of_vllm_have_the_earlier_names_and_latencies(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    one = span(
        0,
        name="llm_request",
        gen_ai__usage__prompt_tokens=14,
        gen_ai__usage__completion_tokens=8,
        gen_ai__latency__time_to_first_token=0.11554598808288574,
        gen_ai__request__id="req-1",
    )
    del one["spanId"], one["traceId"]
    _, rows = run(tmp_path, run_trace, batch(one))
    row = rows[0]
    assert (row.request_id, row.input_tokens, row.output_tokens) == ("req-1", 14, 8)
    assert (row.duration_ttft_ms, row.duration_e2e_ms) == (116, 250)


def test_other_spans_are_skipped_and_counted(tmp_path: Path, run_trace: RunTrace) -> None:
    content = batch(
        span(0, name="POST", http__method="POST"),
        span(1, name="execute_tool x", gen_ai__operation__name="execute_tool"),
        span(
            2,
            name="invoke_agent a",
            gen_ai__operation__name="invoke_agent",
            gen_ai__usage__input_tokens=500,
            gen_ai__usage__output_tokens=50,
        ),
        span(3, name="chat m", gen_ai__operation__name="chat", error__type="timeout"),
        chat(4),
    )
    outcome, rows = run(tmp_path, run_trace, content)
    assert len(rows) == 1
    assert "note: 1 GenAI spans without token counts were skipped\n" in outcome.err
    assert "invoke_agent 1" in outcome.err


def test_spans_of_client_and_server_are_selected_by_name(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    server = span(
        5,
        name="llm_request",
        gen_ai__usage__prompt_tokens=14,
        gen_ai__usage__completion_tokens=8,
    )
    content = batch(chat(0), server)
    outcome, rows = run(tmp_path, run_trace, content)
    assert len(rows) == 2
    assert "requests by span name: chat m 1, llm_request 1" in outcome.err
    outcome, rows = run(tmp_path, run_trace, content, "--only", "name=llm_request")
    assert len(rows) == 1
    assert "requests by span name" not in outcome.err


def test_a_map_reads_other_attributes_of_spans_and_resources(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    content = batch(chat(0, app__tier="gold"), chat(1), service__name="checkout")
    _, rows = run(tmp_path, run_trace, content, "--map", "slo_class=app.tier,org_id=service.name")
    assert [row.slo_class for row in rows] == ["gold", None]
    assert {row.org_id for row in rows} == {"checkout"}


def test_integers_can_be_numbers_and_lists_are_ignored(tmp_path: Path, run_trace: RunTrace) -> None:
    one = chat(0)
    for entry in one["attributes"]:
        if "intValue" in entry["value"]:
            entry["value"] = {"intValue": int(entry["value"]["intValue"])}
    one["attributes"].append(
        {"key": "gen_ai.response.finish_reasons", "value": {"arrayValue": {"values": []}}}
    )
    one["startTimeUnixNano"] = int(one["startTimeUnixNano"])
    _, rows = run(tmp_path, run_trace, batch(one))
    assert rows[0].timestamp_start_unix_ns == START_NS


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (batch(chat(0, (-5, 1))), "column resourceSpans[0].scopeSpans[0].spans[0].gen_ai.usage.i"),
        (batch(chat(0), chat(0)), "line 1 has the same request id"),
        (batch(span(0)), "nothing was imported (the records contain no requests)"),
        (batch(chat(0)) + '{"resourceSpans": 5}\n', "line 2, column resourceSpans: the value is n"),
        ('{"resourceSpans": [5]}\n', "column resourceSpans[0]: the value is not an object"),
        (batch({"attributes": chat(0)["attributes"]}), "startTimeUnixNano: the value is missing"),
        (batch(chat(0) | {"startTimeUnixNano": "soon"}), "startTimeUnixNano: 'soon' is not a w"),
        (batch(chat(0) | {"attributes": {}}), "nothing was imported"),
        (batch(chat(0) | {"attributes": {"a": 1}}), "attributes: the value is not a list"),
    ],
    ids=[
        "negative tokens",
        "duplicate span",
        "no GenAI span",
        "not a list",
        "not an object",
        "no start",
        "no time",
        "no attributes",
        "attributes as an object",
    ],
)
def test_invalid_spans_are_rejected(
    content: str, sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    outcome, _ = run(tmp_path, run_trace, content)
    assert outcome.code == 64
    assert sentence in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["spans.jsonl"]


def test_no_map_value_that_spans_lack_is_accepted(tmp_path: Path, run_trace: RunTrace) -> None:
    outcome, _ = run(tmp_path, run_trace, batch(chat(0)), "--map", "slo_class=app.teir")
    assert outcome.code == 64
    assert "no record has a value in the column app.teir" in outcome.err


def test_spans_without_an_id_get_one_each(tmp_path: Path, run_trace: RunTrace) -> None:
    spans = [chat(0), chat(5)]
    for one in spans:
        del one["spanId"]
    outcome, rows = run(tmp_path, run_trace, batch(*spans))
    assert outcome.code == 0, outcome.err
    assert [row.request_id for row in rows] == ["otel-0000001", "otel-0000002"]
