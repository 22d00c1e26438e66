"""Requirements of this machine for building and starting a cluster.

Each missing requirement is a sentence that names the package to install. Skipped tests and failed
make targets show only these sentences.
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
    """Return the missing requirements of a cluster; empty if one can run here."""
    if not sys.platform.startswith("linux"):
        return [f"the cluster needs Linux namespaces, and this machine runs {sys.platform}"]
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
            "unprivileged processes cannot create user namespaces on this machine "
            f"({tried.stderr.strip()}): check the sysctls user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
        )
    return lacks


def lacks_for_building() -> list[str]:
    """Return the missing requirements of a build; empty if the programs can be built here."""
    wanted = re.search(r"^go (\d+)\.(\d+)", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    assert wanted is not None, "go.mod names its version of Go"
    needs = f"Go {wanted[1]}.{wanted[2]} or later"
    if shutil.which("go") is None:
        return [f"go is missing: install {needs}"]
    version = subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < (int(wanted[1]), int(wanted[2])):
        return [f"{version.strip()} is too old: install {needs}"]
    return []
