"""`records.parquet`: records survive a round trip, and unusable files are rejected."""

from __future__ import annotations

import errno
import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.errors import InputError
from goodput_core.quantiles import P99, quantile
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.judging import Judgement, JudgementKind, MissReason, judge, targets_for
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_replay.runs.files import RECORDS_FILE
from goodput_replay.runs.record_rows import decode_rows, read_judged, read_records
from goodput_replay.runs.records import RECORDS_SCHEMA, RecordWriter, open_records, read_batches

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer
    from tests.replay.conftest import SyntheticRun

_TIMES = st.integers(min_value=-(2**40), max_value=2**60)
_COUNTS = st.integers(min_value=0, max_value=2**40)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_GAPS = st.lists(st.integers(min_value=0, max_value=2**31 - 1), max_size=30).map(tuple)
_TARGETS = st.builds(
    Targets,
    ttft_ns=st.none() | _COUNTS,
    tpot_ns=st.none() | _COUNTS,
    tbt_p99_ns=st.none() | _COUNTS,
    e2e_ns=st.none() | _COUNTS,
)
_RECORDS = st.builds(
    RequestRecord,
    request_id=_TEXT,
    slo_class=_TEXT,
    scheduled_ns=_TIMES,
    outcome=st.sampled_from(Outcome),
    sent_ns=st.none() | _TIMES,
    first_token_ns=st.none() | _TIMES,
    last_token_ns=st.none() | _TIMES,
    end_ns=st.none() | _TIMES,
    gaps_us=_GAPS,
    input_tokens=_COUNTS,
    output_tokens=_COUNTS,
    most_output_tokens=st.none() | _COUNTS,
    pinned_output_tokens=st.none() | _COUNTS,
    targets=_TARGETS,
    cancel_after_ns=st.none() | _COUNTS,
    status=st.none() | st.integers(min_value=100, max_value=599),
    detail=_TEXT,
    replica=_TEXT,
    revision=_TEXT,
    cached_tokens=st.none() | _COUNTS,
    deviations=st.lists(st.sampled_from(Deviation), unique=True, max_size=3).map(tuple),
)
_JUDGEMENTS = st.none() | st.builds(
    Judgement,
    kind=st.sampled_from(JudgementKind),
    reasons=st.lists(st.sampled_from(MissReason), unique=True, max_size=4).map(tuple),
)


def _write(
    folder: Path,
    rows: list[tuple[RequestRecord, Judgement | None]],
    *,
    keep_gaps: bool = True,
    flush_every: int = 10**9,
) -> None:
    sink = io.BytesIO()
    writer = RecordWriter(sink, keep_gaps=keep_gaps)
    for index, (record, judgement) in enumerate(rows):
        writer.append(record, judgement)
        if index % flush_every == flush_every - 1:
            writer.flush()
    writer.close()
    (folder / RECORDS_FILE).write_bytes(sink.getvalue())


@given(rows=st.lists(st.tuples(_RECORDS, _JUDGEMENTS), max_size=8), flush_every=st.integers(1, 9))
@settings(max_examples=examples(60), deadline=None)
def test_records_are_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[RequestRecord, Judgement | None]],
    flush_every: int,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _write(folder, rows, flush_every=flush_every)
    assert [(row.record, row.judgement) for row in read_judged(folder)] == rows
    kept = [record for record, judgement in rows if judgement is not None]
    assert list(read_records(folder)) == kept


@given(rows=st.lists(st.tuples(_RECORDS, _JUDGEMENTS), min_size=3, max_size=8))
@settings(max_examples=examples(60), deadline=None)
def test_a_part_of_a_batch_has_the_rows_of_its_place(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[RequestRecord, Judgement | None]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _write(folder, rows)
    with open_records(folder) as opened:
        (batch,) = read_batches(opened, opened.schema_arrow.names)
    part = batch.slice(1, len(rows) - 2)
    assert [(row.record, row.judgement) for row in decode_rows(part)] == rows[1:-1]


@given(records=st.lists(_RECORDS, min_size=1, max_size=8))
@settings(max_examples=examples(60), deadline=None)
def test_without_gaps_every_request_is_judged_the_same(
    tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    judgements = [judge(record, targets_for(record, {})) for record in records]
    _write(folder, list(zip(records, judgements, strict=True)), keep_gaps=False)
    read = list(read_judged(folder))
    assert [judge(row.record, row.record.targets) for row in read] == judgements
    for record, row in zip(records, read, strict=True):
        p99 = quantile(record.gaps_us, P99) if record.gaps_us else None
        assert row.record == replace(record, gaps_us=(), tbt_p99_us=p99)


def test_reading_without_gaps_gives_their_p99(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    chosen = [record for record in synthetic_run.records if record.gaps_us][:50]
    _write(tmp_path, [(r, judge(r, r.targets)) for r in chosen])
    for original, read in zip(chosen, read_records(tmp_path, gaps=False), strict=True):
        assert read.gaps_us == ()
        assert read.tbt_p99_us == quantile(original.gaps_us, P99)


def _many_rows(count: int) -> list[tuple[RequestRecord, Judgement | None]]:
    """Return records with other labels in every table that the writer converts."""
    records = [
        RequestRecord(
            request_id=f"row-{index}",
            slo_class=f"class-{index // 700 % 5}",
            scheduled_ns=index,
            outcome=Outcome.ERROR if index % 3 else Outcome.OK,
            gaps_us=(index, 1) if index % 2 else (),
            detail=f"error {index // 300}",
        )
        for index in range(count)
    ]
    return [(record, judge(record, record.targets)) for record in records]


def test_row_groups_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goodput_replay.runs.records._GROUP_SHARE", 2)
    rows = _many_rows(20_000)
    _write(tmp_path, rows)
    metadata = pq.ParquetFile(tmp_path / RECORDS_FILE).metadata
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert sizes[:3] == [512, 512, 512]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert len(sizes) < 15
    assert [(row.record, row.judgement) for row in read_judged(tmp_path)] == rows


def test_a_failed_write_of_a_large_row_group_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("goodput_replay.runs.records._GROUP_SHARE", 1)

    class FailingFile(io.BytesIO):
        def write(self, data: ReadableBuffer, /) -> int:
            if self.tell() > 10_000:
                raise OSError(errno.EIO, "input/output error")
            return super().write(data)

    writer = RecordWriter(FailingFile())

    def append_all() -> None:
        for record, judgement in _many_rows(20_000):
            writer.append(record, judgement)

    with pytest.raises(OSError, match="input/output error"):
        append_all()


def test_a_gap_of_hours_is_capped(tmp_path: Path) -> None:
    record = RequestRecord(
        request_id="slow",
        slo_class="",
        scheduled_ns=0,
        outcome=Outcome.OK,
        gaps_us=[5, 2**40, 7],
        output_tokens=4,
    )
    _write(tmp_path, [(record, judge(record, record.targets))])
    (read,) = read_records(tmp_path)
    assert read.gaps_us == (5, 2**31 - 1, 7)


def test_warm_up_rows_are_recorded_and_excluded_from_results(tmp_path: Path) -> None:
    record = RequestRecord(request_id="a", slo_class="x", scheduled_ns=0, outcome=Outcome.OK)
    attained = Judgement(kind=JudgementKind.ATTAINED)
    _write(tmp_path, [(record, None), (replace(record, request_id="b"), attained)])
    assert [row.warmup for row in read_judged(tmp_path)] == [True, False]
    assert [record.request_id for record in read_records(tmp_path)] == ["b"]


def test_any_parquet_tool_can_read_the_judgement_of_each_request(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    classes = synthetic_run.info.slo.by_name()
    judged = [(r, judge(r, targets_for(r, classes))) for r in synthetic_run.records]
    _write(tmp_path, [*judged])
    table = pq.read_table(tmp_path / RECORDS_FILE, columns=["attained", "miss_reasons"]).to_pydict()
    attained = [judgement.kind is JudgementKind.ATTAINED for _, judgement in judged]
    counted = [j.kind in {JudgementKind.ATTAINED, JudgementKind.MISSED} for _, j in judged]
    expected = [good if inside else None for good, inside in zip(attained, counted, strict=True)]
    assert table["attained"] == expected
    assert table["miss_reasons"] == [[r.value for r in j.reasons] for _, j in judged]


def test_a_long_run_is_written_in_many_groups(tmp_path: Path) -> None:
    record = RequestRecord(request_id="a", slo_class="x", scheduled_ns=0, outcome=Outcome.OK)
    _write(tmp_path, [(record, judge(record, record.targets))] * 2000)
    assert pq.ParquetFile(tmp_path / RECORDS_FILE).num_row_groups == 4


def test_many_gaps_are_written_in_several_groups(tmp_path: Path) -> None:
    record = RequestRecord(
        request_id="a", slo_class="x", scheduled_ns=0, outcome=Outcome.OK, gaps_us=[1] * 100_000
    )
    _write(tmp_path, [(record, judge(record, record.targets))] * 9)
    assert pq.ParquetFile(tmp_path / RECORDS_FILE).num_row_groups == 3


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    chosen = synthetic_run.records[:50]
    _write(tmp_path, [(r, judge(r, r.targets)) for r in chosen])
    path = tmp_path / RECORDS_FILE
    pq.write_table(pq.read_table(path).drop_columns(["most_output_tokens", "deviations"]), path)
    assert list(read_records(tmp_path)) == list(chosen)


def test_every_column_is_described() -> None:
    assert all(field.metadata[b"description"].endswith(b".") for field in RECORDS_SCHEMA)


def _missing(_: Path) -> None:
    return


def _killed(folder: Path) -> None:
    (folder / f"{RECORDS_FILE}.partial").write_bytes(b"PAR1")


def _truncated(folder: Path) -> None:
    record = RequestRecord(request_id="a", slo_class="x", scheduled_ns=0, outcome=Outcome.OK)
    _write(folder, [(record, judge(record, record.targets))])
    path = folder / RECORDS_FILE
    path.write_bytes(path.read_bytes()[:-40])


def _damaged(folder: Path) -> None:
    record = RequestRecord(request_id="a" * 900, slo_class="x", scheduled_ns=0, outcome=Outcome.OK)
    _write(folder, [(record, judge(record, record.targets))] * 400)
    path = folder / RECORDS_FILE
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)


def _foreign(folder: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), folder / RECORDS_FILE)


def _later(folder: Path) -> None:
    later = RECORDS_SCHEMA.with_metadata({b"goodput.records_version": b"2"})
    pq.write_table(later.empty_table(), folder / RECORDS_FILE)


def _other_columns(folder: Path) -> None:
    metadata = {b"goodput.records_version": b"1"}
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), folder / RECORDS_FILE)


def _a_folder(folder: Path) -> None:
    (folder / RECORDS_FILE).mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "no such file"),
        (_killed, "the run was killed"),
        (_truncated, "possibly truncated"),
        (_damaged, "damaged"),
        (_foreign, "not written by `replay`"),
        (_later, "the records have version '2'"),
        (_other_columns, "its columns are not those of a run"),
        (_a_folder, "not a readable Parquet file"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_unusable_file_is_rejected_in_one_sentence(
    tmp_path: Path, spoil: object, message: str
) -> None:
    assert callable(spoil)
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        list(read_judged(tmp_path))
    assert RECORDS_FILE in str(error.value)
    assert "\n" not in str(error.value)
