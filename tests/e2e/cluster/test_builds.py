"""Builds of the cluster's programs do not pile up, and none vanishes under a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from tools.cluster import binaries

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which building takes no time."""
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path))
    monkeypatch.setattr(binaries, "lacks_for_building", list)
    monkeypatch.setattr(binaries, "_compile", lambda _package, output, _module: output.touch())
    (tmp_path / "cluster").mkdir()
    return tmp_path / "cluster"


def made(cache: Path, name: str, *, days_ago: float) -> Path:
    folder = cache / name
    folder.mkdir()
    (folder / "kube").touch()
    then = time.time() - days_ago * 86_400
    os.utime(folder, (then, then))
    return folder


def test_a_new_build_removes_those_that_were_not_used_for_the_longest_time(cache: Path) -> None:
    olds = [made(cache, f"v1.0.{n}-0123456789ab", days_ago=n + 1) for n in range(5)]
    binaries.mark_used(olds[4])
    kept_cluster = made(cache, "kept", days_ago=90)
    new = binaries.build()
    assert {path.name for path in cache.iterdir()} == {
        *(path.name for path in (new, olds[4], olds[0], kept_cluster)),
    }
    assert binaries.build() == new, "and what is there is not built again"


def test_a_build_that_a_cluster_runs_from_stays_however_old(cache: Path) -> None:
    for n in range(3):
        made(cache, f"v1.0.{n}-0123456789ab", days_ago=n)
    old = made(cache, "v1.0.9-0123456789ab", days_ago=9)
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, old / "etcd")
    os.utime(old, (0, 0))
    # Where it is one program of many names, it goes by this one.
    with subprocess.Popen(["sleep", "60"], executable=old / "etcd") as running:
        binaries.build()
        assert old.is_dir()
        running.kill()


def test_what_an_interrupted_build_left_is_removed_a_day_later(cache: Path) -> None:
    stale = made(cache, ".building-a", days_ago=2)
    another_process = made(cache, ".building-b", days_ago=0.01)
    binaries.build()
    assert not stale.exists()
    assert another_process.is_dir()
