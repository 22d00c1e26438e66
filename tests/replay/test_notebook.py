"""Replays from Python, and the records of a run as CSV."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.replay.conftest import write_run

from goodput_core.dispatch import run_command
from goodput_core.errors import AbortedRun, InputError, UsageError
from goodput_replay import open_run, run
from goodput_replay.export import plain_batch, write_csv
from goodput_replay.runs.files import RECORDS_FILE, SUMMARY_FILE

if TYPE_CHECKING:
    from tests.replay.conftest import SyntheticRun

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.golden
def test_the_documented_example_prints_what_the_page_says(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "replay.md"
    text = page.read_text(encoding="utf-8")
    found = re.search(
        r"<!-- example: begin -->\n\n```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL
    )
    assert found is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(found[1], str(page), "exec"), {})
    if request.config.getoption("--rewrite-golden"):
        page.write_text(text.replace(found[2], printed.getvalue()), encoding="utf-8")
        return
    assert printed.getvalue() == found[2]


def test_a_run_has_its_tables_as_arrow(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    summary = write_run(tmp_path, synthetic_run.info, synthetic_run.records, force=True)
    found = open_run(tmp_path)
    assert found.summary == summary
    assert found.records.num_rows == len(synthetic_run.records)
    classes = found.classes.to_pylist()
    assert [row["slo_class"] for row in classes] == ["interactive", "batch"]
    assert [row["good"] for row in classes] == [one.good for one in summary.classes]
    assert classes[0]["lower"] <= classes[0]["attainment"] <= classes[0]["upper"]
    assert summary.classes[0].ttft_ms is not None
    assert classes[0]["ttft_p99_ms"] == summary.classes[0].ttft_ms.p99
    timeline = found.timeline.to_pylist()
    assert sum(row["good"] for row in timeline) == summary.overall.good


def test_an_error_of_the_command_is_raised_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^nowhere.parquet: no such file"):
        run(trace="nowhere.parquet", emulate=ROOT / "examples" / "chat.yaml", out=tmp_path / "run")
    with pytest.raises(InputError, match=r"summary\.json"):
        open_run(tmp_path)


def test_options_that_make_no_run_are_rejected_with_the_command_to_use() -> None:
    for option in ("dry_run", "help"):
        with pytest.raises(
            UsageError, match=rf"^{option}: .*`replay --{option.replace('_', '-')}`"
        ):
            run(trace="sample", emulate=ROOT / "examples" / "chat.yaml", **{option: True})


def test_a_run_without_out_is_deleted_with_the_returned_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    chat = ROOT / "examples" / "chat.yaml"
    found = run(trace="sample", emulate=chat, dry_run=False, no_report=True)
    assert found.folder.is_relative_to(tmp_path)
    assert found.records.num_rows == 279
    del found
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no such file"):
        run(trace="nowhere.parquet", emulate=chat)
    assert list(tmp_path.iterdir()) == []


class _FailingHandler(BaseHTTPRequestHandler):
    """Responds to every request with status 500."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_the_records_of_an_aborted_run_are_kept_in_the_folder_that_its_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), _FailingHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(AbortedRun) as caught:
                run(
                    trace="sample",
                    target=f"http://127.0.0.1:{server.server_port}",
                    rate_scale=20,
                    model="any",
                    ttft="1s",
                    tpot="1s",
                    objective="99%",
                    abort_on="error-rate=5%/1s",
                    no_report=True,
                )
        finally:
            server.shutdown()
    (parent,) = tmp_path.iterdir()
    assert str(parent / "run") in str(caught.value)
    assert open_run(parent / "run").records.num_rows > 0


def test_a_run_with_out_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    found = run(trace="sample", emulate=ROOT / "examples" / "chat.yaml", no_report=True, out=out)
    assert found.folder == out
    del found
    gc.collect()
    assert open_run(out).records.num_rows == 279


def test_the_records_are_exported_as_csv(
    tmp_path: Path, synthetic_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "run", tmp_path / "run.csv"
    write_run(folder, synthetic_run.info, synthetic_run.records)
    assert run_command(["replay", "export", str(folder), "--gaps", "-o", str(out)]) == 0
    assert capsys.readouterr().out == ""
    rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(synthetic_run.records)
    for row, record in zip(rows[::50], synthetic_run.records[::50], strict=True):
        assert row["request_id"] == record.request_id
        assert row["outcome"] == record.outcome.value
        assert row["gaps_us"] == ";".join(map(str, record.gaps_us))
        assert row["end_ns"] == str(record.end_ns)
    reasons = {reason for row in rows for reason in row["miss_reasons"].split(";")}
    assert {"ttft", "tpot", "error"} <= reasons


@given(request_id=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
@example("=1+1")
@example("+cmd|' /C calc'!A0")
@example("-2+3")
@example("@SUM(A1)")
@example("\t=1")
@example("\r=1")
@example("\uff1d1")
@example("-17")
@example("+1.5")
@example("'quoted")
@example("a=1")
def test_no_exported_text_is_a_formula_and_others_are_unchanged(request_id: str) -> None:
    batch = pa.RecordBatch.from_pydict({"id": [request_id, None], "delay_ms": [-1.5, -2.5]})
    sink = io.BytesIO()
    write_csv(iter([plain_batch(batch)]), sink)
    text = sink.getvalue().decode()
    header, row, missing = csv.reader(io.StringIO(text, newline=""))
    assert (header, row[1], missing) == (["id", "delay_ms"], "-1.5", ["", "-2.5"])
    is_number = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?", request_id) is not None
    is_formula = request_id[0] in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20" and not is_number
    assert row[0] == f"'{request_id}" if is_formula else request_id


def test_ids_of_a_foreign_trace_are_exported_without_formulas(
    tmp_path: Path, synthetic_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = replace(synthetic_run.records[0], request_id='=HYPERLINK("http://x.test","y")')
    write_run(tmp_path / "run", synthetic_run.info, [hostile, *synthetic_run.records[1:5]])
    assert run_command(["replay", "export", str(tmp_path / "run")]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    ids = {row["request_id"] for row in rows}
    assert ids == {f"'{hostile.request_id}"} | {r.request_id for r in synthetic_run.records[1:5]}


def test_a_run_without_requests_is_exported_as_a_header(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    write_run(tmp_path / "run", synthetic_run.info.incomplete("stopped"), [])
    out = tmp_path / "run.csv"
    assert run_command(["replay", "export", str(tmp_path / "run"), "-o", str(out)]) == 0
    (header,) = out.read_text().splitlines()
    assert header.startswith('"request_id","slo_class"')
    assert "gaps_us" not in header


def test_records_without_the_latest_columns_are_exported(
    tmp_path: Path, synthetic_run: SyntheticRun
) -> None:
    folder, out = tmp_path / "run", tmp_path / "run.csv"
    write_run(folder, synthetic_run.info, synthetic_run.records[:5])
    table = pq.read_table(folder / RECORDS_FILE)
    earlier = table.drop_columns(["sender", "reported_input_tokens"])
    pq.write_table(earlier, folder / RECORDS_FILE)
    # In a process of its own, because the CSV writer can end the process at wrong columns.
    command = [
        sys.executable,
        "-m",
        "goodput_core",
        "replay",
        "export",
        str(folder),
        "-o",
        str(out),
    ]
    assert subprocess.run(command, check=False).returncode == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 5
    assert "sender" not in rows[0]


def test_an_export_never_replaces_a_file_of_the_run(
    tmp_path: Path, synthetic_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    write_run(folder, synthetic_run.info, synthetic_run.records[:5])
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (tmp_path / "link.csv").symlink_to(folder / RECORDS_FILE)
    before = (folder / RECORDS_FILE).read_bytes()
    for out in (folder / RECORDS_FILE, other / SUMMARY_FILE, tmp_path / "link.csv"):
        assert run_command(["replay", "export", str(folder), "-o", str(out)]) == 64
        assert "is a file of a run; name another file" in capsys.readouterr().err
    (tmp_path / "trace.parquet").write_bytes(before)
    assert run_command(["replay", "export", str(folder), "-o", f"{tmp_path}/trace.parquet"]) == 64
    assert "may be a trace" in capsys.readouterr().err
    assert (folder / RECORDS_FILE).read_bytes() == before
    assert run_command(["replay", "export", str(folder), "-o", str(folder / "records.csv")]) == 0


@pytest.mark.parametrize("name", ["missing", "damaged"])
def test_an_export_that_fails_keeps_the_earlier_file(
    tmp_path: Path, synthetic_run: SyntheticRun, name: str
) -> None:
    write_run(tmp_path / "damaged", synthetic_run.info, synthetic_run.records)
    records = tmp_path / "damaged" / RECORDS_FILE
    data = bytearray(records.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 100] = bytes(100)
    records.write_bytes(data)
    out = tmp_path / "run.csv"
    out.write_text("an earlier export")
    command = ["replay", "export", str(tmp_path / name), "--gaps", "-o", str(out)]
    assert run_command(command) == 64
    assert out.read_text() == "an earlier export"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "damaged", out]


def test_a_closed_pipe_ends_the_export_quietly(tmp_path: Path, synthetic_run: SyntheticRun) -> None:
    write_run(tmp_path / "run", synthetic_run.info, synthetic_run.records)
    command = f"{sys.executable} -m goodput_core replay export {tmp_path / 'run'} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


@pytest.mark.parametrize("arguments", [["/nowhere"], ["{run}", "-o", "/nowhere/x.csv"], []])
def test_an_export_that_is_not_possible_is_an_error(
    tmp_path: Path,
    synthetic_run: SyntheticRun,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run", synthetic_run.info, synthetic_run.records[:5])
    given = [one.format(run=tmp_path / "run") for one in arguments]
    assert run_command(["replay", "export", *given]) == 64
    assert capsys.readouterr().err.count("\n") == 1
