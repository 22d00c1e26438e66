"""If a machine cannot run or build the cluster, messages name each missing part and a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tools.cluster import binaries, host
from tools.cluster.starting import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ONE_TEST = "tests/e2e/cluster/test_cluster.py::test_two_nodes_are_ready"


def program(folder: Path, name: str, script: str = "") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_each_missing_program_is_named_with_its_package(bare: Path) -> None:
    for name in ("unshare", "nsenter", "mount", "sysctl"):
        program(bare, name)
    assert host.lacks_for_running() == [
        "ip is missing: install the package iproute2",
        "nft is missing: install the package nftables",
    ]


def test_missing_user_namespaces_are_named_with_the_setting_to_check(bare: Path) -> None:
    for name in ("nsenter", "mount", "sysctl", "ip", "nft"):
        program(bare, name)
    program(bare, "unshare", "echo 'unshare failed: Operation not permitted' >&2; exit 1")
    [reason] = host.lacks_for_running()
    assert "unshare failed: Operation not permitted" in reason
    assert "user.max_user_namespaces" in reason


def test_a_build_needs_go_in_a_recent_version(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(binaries.Unbuildable, match=r"go is missing: install Go 1\.\d+ or later"):
        binaries.build()
    program(bare, "go", "echo go version go1.19.8 linux/amd64")
    with pytest.raises(binaries.Unbuildable, match=r"go1\.19\.8 .* is too old: install Go 1\."):
        binaries.build()
    assert not binaries.is_built()


def test_a_failed_build_leaves_no_file_and_shows_the_compilers_output(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path / "cache"))
    program(bare, "go", "case $1 in version) echo go1.99.0;; *) echo no space >&2; exit 1;; esac")
    with pytest.raises(binaries.Unbuildable, match="does not build:\nno space"):
        binaries.build()
    assert list((tmp_path / "cache" / "cluster").iterdir()) == []


@pytest.mark.parametrize(
    ("required", "outcome"), [("", "1 skipped"), ("1", "1 error")], ids=["skips", "fails"]
)
def test_without_the_binaries_a_test_is_skipped_or_fails_if_a_cluster_is_required(
    required: str, outcome: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ONE_TEST],
        cwd=ROOT,
        env={
            **os.environ,
            "GOODPUT_CACHE": str(tmp_path),
            "GOODPUT_REQUIRE_CLUSTER": required,
            "GOODPUT_KUBECONFIG": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in ended.stdout
    assert "make e2e" in ended.stdout or "no cluster can run here" in ended.stdout
