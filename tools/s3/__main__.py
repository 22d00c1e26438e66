"""Build the S3 server of the tests; its path is printed."""

from __future__ import annotations

import sys

from tools.cluster.binaries import Unbuildable
from tools.s3.server import build

if __name__ == "__main__":
    try:
        print(build())
    except Unbuildable as error:
        sys.exit(f"the S3 server of the tests cannot be built: {error}")
