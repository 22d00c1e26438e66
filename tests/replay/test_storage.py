"""Traces and run folders are copied from and to the file systems of pyarrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UnreachableError
from goodput_replay.storage import (
    download_file,
    download_folder,
    parse_uri,
    require_writable,
    upload_folder,
)
from goodput_traces.sample import sample_path

CHAT_MANIFEST: Final = Path(__file__).parents[2] / "examples" / "chat.yaml"


def test_a_folder_is_the_same_after_upload_and_download(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "nested").mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    (folder / "nested/records.parquet").write_bytes(b"\0" * 5_000_000)
    uri = f"file://{tmp_path}/store/a/run"
    upload_folder(folder, uri)
    copy = download_folder(uri, tmp_path / "copy")
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert found == {"summary.json", "nested/records.parquet"}
    assert (copy / "nested/records.parquet").stat().st_size == 5_000_000
    one = download_file(f"{uri}/summary.json", tmp_path)
    assert one.read_text() == "{}"


def test_a_missing_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file://.*/absent: no such object"):
        download_file(f"file://{tmp_path}/absent", tmp_path)


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnreachableError, match=r"file://.*: cannot be written: "):
        upload_folder(tmp_path, f"file://{tmp_path}/file/run")


def test_a_store_is_written_to_before_the_run_and_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_writable(f"file://{tmp_path}/runs/a")
    assert not any((tmp_path / "runs/a").iterdir())
    (tmp_path / "file").write_text("")
    command = ["replay", "--trace", "sample", "--emulate", str(CHAT_MANIFEST)]
    command += ["--out", str(tmp_path / "run"), "--upload", f"file://{tmp_path}/file/run"]
    assert run_command(command) == 64
    assert f"file://{tmp_path}/file/run: cannot be written: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "no request was sent"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ftp://host/trace", "is not a place in object storage"),
        ("s3://bucket/a b", "is not a place in object storage"),
        ("s3://KEY:hunter2@bucket/trace", "contains credentials"),
        ("gs://user@bucket/trace", "contains credentials"),
    ],
)
def test_other_schemes_and_credentials_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        parse_uri(text)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("uri", ["s3://bucket/a", "s3://bucket/a?region=x", "gs://anonymous@b/a"])
def test_places_in_object_storage_are_accepted(uri: str) -> None:
    assert parse_uri(uri) == uri


def test_a_trace_in_a_store_is_planned_like_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sample.parquet").write_bytes(sample_path().read_bytes())
    totals = []
    for trace in (f"file://{tmp_path}/sample.parquet", "sample"):
        assert run_command(["replay", "--trace", trace, "--dry-run", "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out))
        totals[-1].pop("trace")
    assert totals[0] == totals[1]


def test_an_error_before_the_run_is_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result"
    command = ["replay", "--trace", f"file://{tmp_path}/absent.parquet", "--dry-run"]
    assert run_command([*command, "--result-file", str(result)]) == 64
    content = json.loads(result.read_text())
    assert content["reason"] == "Error"
    problem = "no such object; check the bucket and the path"
    assert content["message"] == f"file://{tmp_path}/absent.parquet: {problem}"
    assert content["message"] in capsys.readouterr().err


def test_a_comparison_reads_its_trace_from_a_store_and_copies_its_runs_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "sample.parquet").write_bytes(sample_path().read_bytes())
    results = {}
    for name, trace in (("stored", f"file://{tmp_path}/sample.parquet"), ("local", "sample")):
        command = ["replay", "ab", "--trace", trace, "--window", "0s..30s"]
        command += ["--emulate", str(CHAT_MANIFEST)] * 2
        command += ["--out", str(tmp_path / name), "--result-file", str(tmp_path / f"{name}.json")]
        command += ["--upload", f"file://{tmp_path}/store/{name}"]
        assert run_command(command) == 2, "thirty seconds are INCONCLUSIVE"
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert results["stored"] == results["local"]
    assert results["stored"]["verdict"] == "INCONCLUSIVE"
    runs = {path.parent.name for path in (tmp_path / "store/stored").rglob("records.parquet")}
    assert runs == {"baseline", "candidate"}


def test_a_trace_that_a_store_lacks_ends_a_comparison_before_its_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result"
    command = ["replay", "ab", "--trace", f"file://{tmp_path}/absent.parquet"]
    command += ["--emulate", str(CHAT_MANIFEST)] * 2
    command += ["--out", str(tmp_path / "runs"), "--result-file", str(result)]
    assert run_command(command) == 64
    content = json.loads(result.read_text())
    assert content["reason"] == "Error"
    assert f"file://{tmp_path}/absent.parquet: no such object" in content["message"]
    assert content["message"] in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("pair-*"))
