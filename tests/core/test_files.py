"""Atomic replacement of files."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from goodput_core.files import (
    atomic_file,
    is_disk_full,
    partial_path,
    write_atomically,
    write_output,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_replaced_by_its_new_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"a longer old content")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    partial_path(path).mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_an_interrupted_write_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")

    def interrupt(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_an_output_replaces_the_target_of_a_link_and_not_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "gate.xml", tmp_path / "latest.xml"
    target.write_bytes(b"a longer old content")
    link.symlink_to(target.name)
    write_output(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [target, link]


def test_an_output_is_written_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"new")
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_reader_sees_the_old_content_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_file(tmp_path / "trace.parquet") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_the_bytes_are_on_the_disk_before_the_file_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "trace.parquet", []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr("goodput_core.files.os.fsync", fsync)
    with atomic_file(path) as file:
        file.write(b"1234")
    assert synced == [(4, False)]


@pytest.mark.parametrize(
    ("number", "full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)],
    ids=["full-disk", "quota", "permission"],
)
def test_a_full_disk_is_recognised(number: int, full: bool) -> None:
    assert is_disk_full(OSError(number, "")) is full
