"""Build the programs of a cluster from Go modules once, and keep them outside the checkout.

The versions are declared in two files only: `go/go.mod` for Kubernetes and etcd, `go/tools/go.mod`
for CoreDNS and Helm. A build's name is a digest of its Go sources, versions and recipe, so a
changed source is another build, and several checkouts share one. A new build removes the least
recently used ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tools.cache import cache_folder
from tools.cluster.host import GO_MODULE, lacks_for_building

__all__ = [
    "Unbuildable",
    "build",
    "folder",
    "go_environment",
    "is_built",
    "mark_used",
    "version_of",
]

_PARTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "new-key",
)
_TOOLS = {
    "coredns": "github.com/coredns/coredns",
    "helm": "helm.sh/helm/v4/cmd/helm",
}
_RECIPE = 1
"""Incremented when `_compile` changes, which invalidates earlier builds."""
_KEPT = 3
"""Number of builds, of about 290 MB each."""
_BUILDS = "v*-*"
_MAKING = ".building-"
_DAY_S = 24 * 3600


class Unbuildable(Exception):
    """The binaries cannot be built here; the text gives the reason and the remedy."""


def version_of(module: str) -> str:
    """Return the version of a Go module in the build, with its `v`."""
    for path in (GO_MODULE / "go.mod", GO_MODULE / "tools" / "go.mod"):
        found = re.search(rf"^\s*{re.escape(module)} (v\S+)", path.read_text(), re.MULTILINE)
        if found:
            return found[1]
    raise KeyError(module)


def folder() -> Path:
    """Return the folder of this checkout's build, which need not exist."""
    digest = hashlib.sha256(platform.machine().encode())
    sources = [p for p in GO_MODULE.rglob("*") if p.name.endswith((".go", "go.mod", "go.sum"))]
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_PARTS, _TOOLS, _RECIPE)).encode())
    kubernetes = version_of("k8s.io/kubernetes")
    return cache_folder() / "cluster" / f"{kubernetes}-{digest.hexdigest()[:12]}"


def is_built() -> bool:
    """True if this checkout's build is in the cache."""
    return folder().is_dir()


def build() -> Path:
    """Build the programs unless they are cached, and return their folder; progress is on stderr.

    Raises:
        Unbuildable: no suitable Go, or the compiler or a download failed.
    """
    done = folder()
    if done.is_dir():
        mark_used(done)
        return done
    lacks = lacks_for_building()
    if lacks:
        raise Unbuildable("; ".join(lacks))
    done.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted build must not leave the final folder.
    making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=done.parent))
    try:
        making.chmod(0o755)
        _compile("./launcher", making / "launcher", GO_MODULE)
        _compile("./kube", making / "kube", GO_MODULE)
        for part in _PARTS:
            (making / part).symlink_to("kube")
        for name, package in _TOOLS.items():
            _compile(package, making / name, GO_MODULE / "tools")
        making.rename(done)
    except OSError:
        if not done.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _prune(done.parent)
    return done


def mark_used(build_folder: Path) -> None:
    """Mark a build as used now; the least recently used builds are removed first."""
    with contextlib.suppress(OSError):  # a read-only cache, which is never pruned
        os.utime(build_folder)


def _prune(cache: Path) -> None:
    """Remove builds except the most recently used ones and those in use."""
    running = {
        str(Path(process.info["exe"]).parent)
        for process in psutil.process_iter(["exe"])
        if process.info["exe"]
    }
    by_use = sorted(cache.glob(_BUILDS), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_use[_KEPT:]:
        if str(old.resolve()) not in running:
            shutil.rmtree(old, ignore_errors=True)
    for stale in cache.glob(f"{_MAKING}*"):
        if time.time() - stale.stat().st_mtime > _DAY_S:
            shutil.rmtree(stale, ignore_errors=True)


def go_environment() -> dict[str, str]:
    """Return the environment of Go, with the caches of this project."""
    cache = cache_folder() / "go"
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "",
        "GOWORK": "off",
        "GOTOOLCHAIN": "local",
        "GOMODCACHE": str(cache / "mod"),
        "GOCACHE": str(cache / "build"),
    }


def _compile(package: str, output: Path, module: Path) -> None:
    """Compile one program; without these flags a server reports version v0.0.0-master."""
    version = version_of("k8s.io/kubernetes")
    _, minor, _ = version.split(".")
    stamp = "k8s.io/component-base/version"
    names = {
        f"{stamp}.gitVersion": version,
        f"{stamp}.gitMajor": "1",
        f"{stamp}.gitMinor": minor,
        f"{stamp}.gitTreeState": "clean",
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    flags = "-s -w"
    if module == GO_MODULE:
        flags += "".join(f" -X {name}={value}" for name, value in names.items())
    print(f"building {output.name} …", end=" ", flush=True, file=sys.stderr)
    began = time.monotonic()
    ended = subprocess.run(
        ["go", "build", "-trimpath", "-mod=readonly", "-ldflags", flags, "-o", output, package],
        cwd=module,
        env=go_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        print("failed", file=sys.stderr)
        raise Unbuildable(f"{package} does not build:\n{ended.stderr.strip()}")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
