"""`summary.json`: values equal a plain count, the schema is shipped, bad files are rejected."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from fractions import Fraction
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.builders.records import finished_request, request_record
from tests.replay.conftest import make_run, write_run

from goodput_core.errors import InputError
from goodput_core.quantiles import P50, P99, quantile
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.judging import judge, targets_for
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.units import NS_PER_MS
from goodput_replay.runs.columns import ColumnParts, count_gaps
from goodput_replay.runs.files import SUMMARY_FILE
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.formatting import format_percent
from goodput_replay.runs.json_results import encode_json
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.runs.rounding import cut_share
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import (
    Summary,
    read_summary,
    write_summary,
)
from goodput_replay.runs.terminal import print_summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun

    from goodput_core.slo.record import RequestRecord


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory, synthetic_run: SyntheticRun) -> Summary:
    folder = tmp_path_factory.mktemp("summary")
    return write_run(folder, synthetic_run.info, synthetic_run.records)


@pytest.mark.golden
def test_the_summary_of_fixed_records_does_not_change(
    summary: Summary, golden: Callable[[str, str], None]
) -> None:
    golden("run_summary.json", encode_json(summary).decode())


def test_counts_and_rates_match_the_records(summary: Summary, synthetic_run: SyntheticRun) -> None:
    classes = synthetic_run.info.slo.by_name()
    for one in summary.classes:
        mine = [r for r in synthetic_run.records if r.slo_class == one.name]
        kinds = [judge(r, targets_for(r, classes)).kind.value for r in mine]
        assert one.requests == len(mine)
        assert one.good == kinds.count("attained")
        assert one.total == one.good + kinds.count("missed")
        assert sum(one.outcomes.values()) == len(mine)
        assert one.goodput_per_s == pytest.approx(one.good / 300, abs=1e-6)
        assert one.output_tokens == sum(r.output_tokens for r in mine)
    assert summary.overall.good == sum(one.good for one in summary.classes)
    assert summary.overall.requests == summary.window.rows_planned == summary.window.rows_sent


def test_deviations_of_a_valid_run_are_named(synthetic_run: SyntheticRun, tmp_path: Path) -> None:
    several = Deviation.SEVERAL_TOKENS_PER_EVENT
    records = [replace(r, deviations=(several,)) for r in synthetic_run.records]
    summary = write_run(tmp_path, synthetic_run.info, records)
    assert summary.validity.valid
    # Some of the responses timed out before they had missed a target.
    deviation, cut = summary.validity.deviations
    assert cut.kind is Deviation.CUT_BY_CLIENT
    assert (deviation.kind, deviation.count) == (several, len(records))
    assert f"deviations of the target: {len(records)} responses have" in summary.validity.sentence
    shown = StringIO()
    print_summary(summary, Console(file=shown, width=200))
    assert f"target: {deviation.sentence}" in shown.getvalue()


@pytest.mark.parametrize("prompt", PromptKind)
def test_longer_texts_than_in_the_trace_cannot_fail_a_service(
    prompt: PromptKind, tmp_path: Path
) -> None:
    run = make_run(failures=0.5)
    info = replace(run.info, target=replace(run.info.target, prompt=prompt))
    assert write_run(tmp_path / "equal", info, run.records).verdict.kind is VerdictKind.FAIL
    records = [replace(r, reported_input_tokens=2 * r.input_tokens) for r in run.records]
    summary = write_run(tmp_path / "double", info, records)
    is_text = prompt is not PromptKind.TOKEN_IDS  # ids have the same length on every server
    assert (summary.verdict.reason is Reason.PROMPT_LENGTHS) is is_text
    assert summary.validity.valid is not is_text


def test_weights_are_summed_only_if_they_differ(
    summary: Summary, synthetic_run: SyntheticRun, tmp_path: Path
) -> None:
    assert summary.overall.weighted_goodput_per_s is None
    assert {row.weighted_goodput_per_s for row in summary.classes} == {None}
    info = synthetic_run.info
    weights = {c.name: 2 + 3 * i for i, c in enumerate(info.slo.classes)}
    classes = tuple(replace(c, weight=weights[c.name]) for c in info.slo.classes)
    weighted = write_run(
        tmp_path, replace(info, slo=replace(info.slo, classes=classes)), synthetic_run.records
    )
    total = 0.0
    for row in weighted.classes:
        total += (worth := row.good * weights.get(row.name, 1) / 300)
        assert row.weighted_goodput_per_s == pytest.approx(worth, abs=1e-4)
    assert weighted.overall.weighted_goodput_per_s == pytest.approx(total, abs=1e-4)
    assert weighted.overall.goodput_per_s == summary.overall.goodput_per_s
    assert {p.name: p.weight for p in weighted.promises} == weights
    console = Console(width=160, record=True, file=StringIO())
    print_summary(weighted, console)
    assert "weighted" in console.export_text()
    plain = Console(width=160, record=True, file=StringIO())
    print_summary(summary, plain)
    assert "weighted" not in plain.export_text()


def test_latencies_are_nearest_rank_quantiles_of_the_records(
    summary: Summary, synthetic_run: SyntheticRun
) -> None:
    ttft = [r.ttft_ns for r in synthetic_run.records if r.ttft_ns is not None]
    assert summary.overall.ttft_ms is not None
    assert summary.overall.ttft_ms.count == len(ttft)
    assert summary.overall.ttft_ms.p99 == round(quantile(ttft, P99) / NS_PER_MS, 3)
    assert summary.overall.ttft_ms.max == round(max(ttft) / NS_PER_MS, 3)
    tpot = [round(r.tpot_ns) for r in synthetic_run.records if r.tpot_ns is not None]
    assert summary.overall.tpot_ms is not None
    assert summary.overall.tpot_ms.p50 == pytest.approx(quantile(tpot, P50) / NS_PER_MS, abs=1e-3)
    gaps = [gap for r in synthetic_run.records for gap in r.gaps_us]
    assert summary.overall.tbt_ms is not None
    assert summary.overall.tbt_ms.count == len(gaps)
    assert summary.overall.tbt_ms.p99 == pytest.approx(quantile(gaps, P99) / 1000, rel=1e-3)
    assert summary.overall.tbt_ms.max == max(gaps) / 1000
    e2e = [r.e2e_ns for r in synthetic_run.records if r.e2e_ns is not None]
    assert summary.overall.e2e_ms is not None
    assert summary.overall.e2e_ms.count == len(e2e)


def test_the_verdict_states_that_it_is_of_a_single_run(summary: Summary) -> None:
    assert summary.verdict.runs == 1
    assert "single run" in summary.verdict.sentence


def test_each_class_has_a_verdict_and_an_interval(summary: Summary) -> None:
    for one in summary.classes:
        assert one.verdict in {VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.INCONCLUSIVE}
        assert one.interval is not None
        assert one.attainment is not None
        assert one.interval.lower <= one.attainment <= one.interval.upper
        assert one.objective is not None


def test_rows_without_a_record_make_the_run_invalid(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = replace(synthetic_run.info, rows_planned=len(synthetic_run.records) + 5)
    summary = write_run(tmp_path, info, synthetic_run.records)
    assert summary.validity.unsent_rows == 5
    assert not summary.validity.valid
    assert summary.validity.reason is Reason.UNSENT_ROWS


def test_a_run_without_a_single_request_still_has_a_summary(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = replace(synthetic_run.info.incomplete("interrupted at once"), rows_planned=0)
    summary = write_run(tmp_path, info, ())
    assert summary.overall.requests == 0
    assert summary.overall.attainment is None
    assert summary.overall.ttft_ms is None
    assert summary.validity.lag_ms is None
    assert [one.name for one in summary.classes] == ["interactive", "batch"]


def test_requests_without_a_target_are_reported_and_not_judged(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    info = replace(synthetic_run.info, slo=SLOClasses())
    records = [
        replace(r, slo_class="", targets=Targets()) for r in synthetic_run.records if r.sent_ns
    ]
    summary = write_run(tmp_path, replace(info, rows_planned=len(records)), records)
    (only,) = summary.classes
    assert (only.name, only.total, only.unjudged) == ("", 0, len(records))
    assert only.verdict is None
    assert only.ttft_ms is not None
    assert summary.verdict.reason is Reason.NO_OBJECTIVE


def test_a_response_after_the_window_is_not_served_in_it(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    def answered(name: str, end_s: int) -> RequestRecord:
        return finished_request(
            request_id=name,
            slo_class="batch",
            ttft_ms=1000,
            tpot_ms=(end_s - 1) * 1000,
            tokens=2,
        )

    info = replace(synthetic_run.info, rows_planned=2)
    summary = write_run(tmp_path, info, [answered("in", 300), answered("out", 301)])
    assert summary.overall.served_per_s == round(1 / 300, 6)


@given(share=st.fractions(0, 1))
def test_a_printed_share_never_exceeds_the_measured_one(share: Fraction) -> None:
    printed = cut_share(share)
    assert round(printed * 10**6) <= share * 10**6 < round(printed * 10**6) + 1


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (Fraction(57, 100), "57.00%"),
        (Fraction(29, 100), "29.00%"),
        (Fraction(98_999, 100_000), "98.99%"),
        (Fraction(999_999, 1_000_000), "99.99%"),
        (Fraction(1), "100.00%"),
        (Fraction(0), "0.00%"),
    ],
)
def test_a_printed_percentage_is_truncated(share: Fraction, words: str) -> None:
    assert format_percent(cut_share(share)) == words


def test_columns_agree_with_the_records(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    write_run(tmp_path, synthetic_run.info, synthetic_run.records)
    (columns,) = ColumnParts(tmp_path)
    classes = synthetic_run.info.slo.by_name()
    for index, record in enumerate(synthetic_run.records[:300]):
        judgement = judge(record, targets_for(record, classes))
        assert columns.of_kind(judgement.kind)[index]
        assert columns.outcome(index) is record.outcome
        assert columns.of_class(record.slo_class)[index]
        for reason in judgement.reasons[:1]:
            assert columns.of_first_reason(reason)[index]
    counts = count_gaps(tmp_path)
    for name, counted in counts.items():
        mine = [r for r in synthetic_run.records if r.slo_class == name]
        assert counted.total == sum(len(r.gaps_us) for r in mine)


@pytest.mark.parametrize("part_rows", [1, 600, 10**6])
def test_parts_of_a_run_are_its_columns(
    tmp_path: Path, synthetic_run: SyntheticRun, part_rows: int
) -> None:
    with RunWriter(tmp_path, slo=synthetic_run.info.slo) as writer:
        for index, record in enumerate(synthetic_run.records):
            writer.append(record, warmup=index % 3 == 0)
    (whole,) = ColumnParts(tmp_path, ids=True)
    assert whole.row.tolist() == [i for i in range(len(synthetic_run.records)) if i % 3]
    reader = ColumnParts(tmp_path, part_rows=part_rows, ids=True)
    for parts in (list(reader), list(reader)):
        assert (len(parts) == 1) == (part_rows == 10**6)
        assert parts[-1].class_names == whole.class_names
        joined_ids = [name for part in parts for name in part.ids.to_pylist()]
        assert joined_ids == whole.ids.to_pylist()
        for field in fields(whole)[1:-1]:
            joined = np.concatenate([getattr(part, field.name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole, field.name))


def test_a_summary_is_read_back_as_it_was_written(tmp_path: Path, summary: Summary) -> None:
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary


def _edited(summary: Summary, edit: Callable[[dict[str, Any]], object]) -> bytes:
    values = json.loads(encode_json(summary))
    edit(values)
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: b"", "not a run's summary"),
        (lambda s: encode_json(s)[:900], "not a run's summary"),
        (lambda _: b"[1, 2]", "not a run's summary"),
        (lambda _: b"{}", "version"),
        (lambda _: b"\xff\xfe{", "not a run's summary"),
        (lambda s: _edited(s, lambda v: v.update(version="2")), "reads version 1"),
        (lambda s: _edited(s, lambda v: v["overall"].pop("good")), "good"),
        (lambda s: _edited(s, lambda v: v["verdict"].update(kind="MAYBE")), "MAYBE"),
        (lambda _: b" " * (17 << 20), "too large for a summary"),
    ],
    ids=["empty", "cut", "list", "object", "binary", "later", "field", "verdict", "huge"],
)
def test_an_unusable_summary_is_rejected_in_one_sentence(
    tmp_path: Path, summary: Summary, spoil: Callable[[Summary], bytes], message: str
) -> None:
    (tmp_path / SUMMARY_FILE).write_bytes(spoil(summary))
    with pytest.raises(InputError, match=message) as error:
        read_summary(tmp_path)
    assert SUMMARY_FILE in str(error.value)
    assert "\n" not in str(error.value)


def test_a_summary_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SUMMARY_FILE)
    with pytest.raises(InputError, match=r"summary\.json: not a regular file"):
        read_summary(tmp_path)


def test_a_later_version_with_one_more_field_is_still_read(
    tmp_path: Path, summary: Summary
) -> None:
    (tmp_path / SUMMARY_FILE).write_bytes(_edited(summary, lambda v: v.update(extra={"a": 1})))
    assert read_summary(tmp_path) == summary


def test_the_ten_most_frequent_errors_are_listed_and_the_others_counted(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    def failed(number: int, detail: str) -> RequestRecord:
        return request_record(
            request_id=f"r{number}",
            slo_class="batch",
            sent_ns=0,
            end_ns=1,
            outcome=Outcome.ERROR,
            status=400,
            detail=detail,
        )

    records = [failed(i, "HTTP 400: usual") for i in range(5)]
    records += [failed(100 + i, f"HTTP 400: {i:02}") for i in range(12)]
    info = replace(synthetic_run.info, rows_planned=len(records))
    with RunWriter(tmp_path, slo=info.slo) as writer:
        writer.append(failed(999, "HTTP 400: warm-up"), warmup=True)
        for record in records:
            writer.append(record)
        summary = writer.finish(info)
    assert len(summary.errors) == 10
    first = summary.errors[0]
    assert (first.outcome, first.status, first.detail, first.count) == (
        "error",
        400,
        "HTTP 400: usual",
        5,
    )
    assert summary.other_errors == 3
    assert sum(e.count for e in summary.errors) + summary.other_errors == len(records)
    assert summary.validity.client_errors == len(records)
