"""Self-signed certificates."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def make_certificate(folder: Path) -> Path:
    """Write `cert.pem`, a self-signed certificate of 127.0.0.1, and `key.pem` to a folder."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("NOT RUN: openssl is missing; install it with `apt-get install openssl`")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder
