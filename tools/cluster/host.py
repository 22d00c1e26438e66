"""Requirements of this machine for building and starting a cluster.

Every lack is one sentence that names the package to install: a test that is skipped, and a make
target that ends, show nothing else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["GO_MODULE", "lacks_for_building", "lacks_for_running"]

GO_MODULE = Path(__file__).parent / "go"

_PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "util-linux",
    "ip": "iproute2",
    "nft": "nftables",
    "sysctl": "procps",
}


def lacks_for_running() -> list[str]:
    """Why no cluster can run here; empty when one can."""
    if not sys.platform.startswith("linux"):
        return [f"the cluster is made of Linux namespaces, and this machine runs {sys.platform}"]
    lacks = [
        f"{program} is missing: install the package {package}"
        for program, package in _PROGRAMS.items()
        if shutil.which(program) is None
    ]
    if lacks:
        return lacks
    tried = subprocess.run(
        ["unshare", "-Urnmpf", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        lacks.append(
            "this machine gives unprivileged processes no user namespace "
            f"({tried.stderr.strip()}): look at the sysctls user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
        )
    return lacks


def lacks_for_building() -> list[str]:
    """Why the binaries cannot be built here; empty when they can."""
    wanted = re.search(r"^go (\d+)\.(\d+)", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    assert wanted is not None, "a go.mod names its Go"
    needs = f"Go {wanted[1]}.{wanted[2]} or later"
    if shutil.which("go") is None:
        return [f"go is missing: install {needs}"]
    said = subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (int(wanted[1]), int(wanted[2])):
        return [f"{said.strip()} is too old: install {needs}"]
    return []
