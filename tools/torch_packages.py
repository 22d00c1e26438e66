"""Install torch and transformers once, outside the checkout, for every virtual environment.

`python -m tools.torch_packages VENV` installs the extra `torch` into the cache, which takes
minutes, and links the folder in the environment with a `.pth` file, which takes none. The name of
the folder is a digest of everything that determines its content, so changed pins get another
folder, and several checkouts share one. Only the standard library is imported, because nothing
else is installed yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Final

from tools.cache import cache_folder

__all__ = ["INSTALLED_GB", "is_installed", "packages_folder", "require_space"]

INSTALLED_GB: Final = 5
"""Size of the installed packages, in gigabytes."""

_ROOT: Final = Path(__file__).resolve().parents[1]
_CONSTRAINTS: Final = _ROOT / "constraints.txt"
_LINK: Final = "goodput-torch.pth"
_INSTALLED: Final = "site-packages"
_COMPLETE: Final = "complete"
_PARTIAL: Final = "partial-"
_DOWNLOADED_GB: Final = 3
_UNUSED_S: Final = 7 * 24 * 3600
_INSTALL_S: Final = 1800
_GB: Final = 10**9


def is_installed() -> bool:
    """True if the packages are in the cache."""
    return (packages_folder() / _COMPLETE).exists()


def require_space(
    folder: Path, needed_gb: float, *, remedy: str = "name another folder with GOODPUT_CACHE"
) -> None:
    """End the command if the disk has too little space.

    Args:
        folder: folder of the download, which may not exist yet.
        needed_gb: required space, in gigabytes.
        remedy: how the user can choose another disk.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_gb = shutil.disk_usage(existing).free / _GB
    if free_gb < needed_gb:
        sys.exit(
            f"error: {folder} needs {needed_gb:g} GB, and its disk has {free_gb:.1f} GB left; free "
            f"some space, or {remedy}"
        )


def main(environment: Path) -> None:
    """Install the packages if they are missing, and add them to a virtual environment."""
    folder = packages_folder()
    if not is_installed():
        _install(folder)
    (folder / _COMPLETE).touch()
    # Programs take modules below a folder of this name for installed ones. Hypothesis would read
    # the constants of 1,900 modules of torch and transformers, as if they were the project's.
    named = folder / _INSTALLED
    with suppress(FileExistsError):
        named.symlink_to(".")
    (packages,) = environment.glob(f"lib/python3*/{_INSTALLED}")
    (packages / _LINK).write_text(f"{named}\n", encoding="utf-8")
    _remove_unused(folder)


def packages_folder() -> Path:
    """Return the folder of the packages of these pins, which may not be installed yet."""
    parts = (
        *_requirements(),
        _CONSTRAINTS.read_text(encoding="utf-8"),
        "{}.{}".format(*sys.version_info),
        platform.system(),
        platform.machine(),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder().absolute() / "torch" / digest[:12]


def _requirements() -> list[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["optional-dependencies"]["torch"]]


def _install(folder: Path) -> None:
    """Install into a temporary folder and rename it, so that a folder is complete or absent."""
    print(f"installing torch and transformers into {folder} ({INSTALLED_GB} GB, 2 to 5 minutes)")
    require_space(folder, INSTALLED_GB + _DOWNLOADED_GB)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=folder.parent) as temporary:
        target = Path(temporary) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        subprocess.run(
            [*pip, "--constraint", str(_CONSTRAINTS), *_requirements()],
            check=True,
            timeout=_INSTALL_S,
            stderr=subprocess.PIPE,
            text=True,
            # pip downloads and unpacks there; the usual folder may be on a small disk.
            env={**os.environ, "TMPDIR": temporary},
        )
        (target / _COMPLETE).touch()
        with suppress(OSError):  # another process was faster
            target.rename(folder)


def _remove_unused(folder: Path) -> None:
    """Remove folders of other versions that were not linked for a week, and abandoned ones."""
    for other in folder.parent.iterdir():
        used = other / _COMPLETE if (other / _COMPLETE).exists() else other
        if other != folder and time.time() - used.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except subprocess.TimeoutExpired:
        sys.exit(f"error: torch was not installed within {_INSTALL_S // 60} minutes; try again")
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or [f"pip ended with {error.returncode}"])[-1].removeprefix("ERROR: ")
        sys.exit(f"error: torch could not be installed ({reason}); check the network and try again")
