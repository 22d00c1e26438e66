"""The file of `--result-file`: checked before a command begins, and never the only verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from goodput_core.dispatch import run_command
from goodput_core.errors import InputError, UsageError
from goodput_core.replay_job import decode_message
from goodput_replay.result_options import reporting_errors
from goodput_replay.runs.files import DiskFullError

CHAT_MANIFEST: Final = Path(__file__).parents[2] / "examples" / "chat.yaml"
REPLAY: Final = ["replay", "--trace", "sample", "--window", "..3s", "--no-report"]
EMULATE: Final = ["--emulate", str(CHAT_MANIFEST)]
AB: Final = ["replay", "ab", "--trace", "sample", "--window", "..3s", *EMULATE, *EMULATE]


def test_a_file_that_cannot_be_written_ends_the_command_before_it_begins(tmp_path: Path) -> None:
    for file in (tmp_path / "absent" / "result", tmp_path):
        begun = False
        with (
            pytest.raises(InputError, match=r"--result-file .*: cannot be written"),
            reporting_errors(file),
        ):
            begun = True
        assert not begun


def test_a_full_disk_is_found_before_the_command_begins(tiny_disk: Path) -> None:
    with pytest.raises(OSError, match="space"):
        (tiny_disk / "rest").write_bytes(bytes(13 << 20))
    with (
        pytest.raises(DiskFullError, match=r"--result-file .*: the disk is full"),
        reporting_errors(tiny_disk / "result"),
    ):
        pytest.fail("the block began")


def test_a_device_that_is_full_is_an_error_of_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*REPLAY, *EMULATE, "--out", str(tmp_path / "run"), "--json"]
    assert run_command([*command, "--result-file", "/dev/full"]) == 70
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"]
    assert captured.err.endswith(
        "error: --result-file /dev/full: the disk is full; free some space and run again\n"
    )


def test_the_result_of_an_earlier_command_is_removed_first(tmp_path: Path) -> None:
    file = tmp_path / "result"
    file.write_text('{"verdict": "PASS"}')
    with pytest.raises(KeyboardInterrupt), reporting_errors(file):
        raise KeyboardInterrupt
    assert file.read_bytes() == b""


def test_an_error_is_reported_although_its_file_vanished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "result"
    file.parent.mkdir()

    def fail() -> None:
        with reporting_errors(file):
            file.unlink()
            file.parent.rmdir()
            raise UsageError("the cause")

    with pytest.raises(UsageError, match="the cause"):
        fail()
    assert capsys.readouterr().err.startswith(f"warning: --result-file {file}: cannot be written")


@pytest.mark.parametrize(
    ("command", "blocked"),
    [
        ([*REPLAY, *EMULATE], "records.parquet"),
        (AB, "pair-1"),
    ],
    ids=["replay", "ab"],
)
def test_a_failed_upload_does_not_hide_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], blocked: str
) -> None:
    store, file = tmp_path / "store", tmp_path / "result"
    if blocked == "pair-1":
        store.mkdir()
        (store / blocked).write_text("a file in place of a folder")
    else:
        (store / blocked).mkdir(parents=True)
    command = [*command, "--json", "--out", str(tmp_path / "out"), "--result-file", str(file)]
    assert run_command([*command, "--upload", f"file://{store}"]) == 64
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"]
    assert "cannot be written" in captured.err
    found = decode_message(file.read_text())
    assert found is not None
    assert found.verdict is None


@pytest.mark.parametrize("kind", ["gate", "ab"])
def test_a_full_result_file_does_not_hide_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    command = [*AB, "--out", str(tmp_path / "ab")]
    if kind == "gate":
        assert run_command(command) == 2
        command = ["replay", "gate", str(tmp_path / "ab")]
        capsys.readouterr()
    assert run_command([*command, "--json", "--result-file", "/dev/full"]) == 70
    assert json.loads(capsys.readouterr().out)["verdict"] == "INCONCLUSIVE"
