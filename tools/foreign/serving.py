"""`python -m tools.foreign.serving`: install what `transformers serve` needs beside `make torch`.

The packages have 5 MB. They are not in constraints.txt, because a change of the constraints would
install torch again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Final

from tools.foreign.servers import COMPLETE, serving_packages

_PACKAGES: Final = (
    "fastapi==0.165.0",
    "opentelemetry-api==1.45.2",
    "starlette==1.10.0",
    "uvicorn==0.54.0",
)
_INSTALL_S: Final = 300


def main() -> None:
    """Install the packages, unless they are complete."""
    target = serving_packages()
    if (target / COMPLETE).exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    options = ["install", "--quiet", "--no-deps", "--target", str(target)]
    command = [sys.executable, "-m", "pip", *options, *_PACKAGES]
    subprocess.run(command, check=True, timeout=_INSTALL_S)
    (target / COMPLETE).touch()


if __name__ == "__main__":
    try:
        main()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"transformers serve could not be installed ({error}); call the command again")
