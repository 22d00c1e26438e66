"""Old builds of the cluster's programs are removed, except those in use."""

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
    """A cache in which a build only creates empty files."""
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path))
    monkeypatch.setattr(binaries, "lacks_for_building", list)
    monkeypatch.setattr(binaries, "_compile", lambda _package, output, _module: output.touch())
    (tmp_path / "cluster").mkdir()
    return tmp_path / "cluster"


def create_build(cache: Path, name: str, *, days_ago: float) -> Path:
    folder = cache / name
    folder.mkdir()
    (folder / "kube").touch()
    then = time.time() - days_ago * 86_400
    os.utime(folder, (then, then))
    return folder


def test_a_new_build_removes_the_least_recently_used_builds(cache: Path) -> None:
    olds = [create_build(cache, f"v1.0.{n}-0123456789ab", days_ago=n + 1) for n in range(5)]
    binaries.mark_used(olds[4])
    kept_cluster = create_build(cache, "kept", days_ago=90)
    new = binaries.build()
    assert {path.name for path in cache.iterdir()} == {
        *(path.name for path in (new, olds[4], olds[0], kept_cluster)),
    }
    assert binaries.build() == new, "an existing build is reused"


def test_a_build_in_use_is_not_removed_at_any_age(cache: Path) -> None:
    for n in range(3):
        create_build(cache, f"v1.0.{n}-0123456789ab", days_ago=n)
    old = create_build(cache, "v1.0.9-0123456789ab", days_ago=9)
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, old / "etcd")
    os.utime(old, (0, 0))
    # `sleep` may be one of the names of a multi-call program.
    with subprocess.Popen(["sleep", "60"], executable=old / "etcd") as running:
        binaries.build()
        assert old.is_dir()
        running.kill()


def test_files_of_an_interrupted_build_are_removed_a_day_later(cache: Path) -> None:
    stale = create_build(cache, ".building-a", days_ago=2)
    another_process = create_build(cache, ".building-b", days_ago=0.01)
    binaries.build()
    assert not stale.exists()
    assert another_process.is_dir()
