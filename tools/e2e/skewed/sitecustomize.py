"""A clock that differs between the pods of an Indexed Job, for tests.

Python imports this module at its start if its folder is on the path. The clock of each pod is a
minute ahead of that of the pod before, as on nodes without a time service. The nodes of the test
cluster share one clock.
"""

from __future__ import annotations

import os
import time

_read_ns = time.time_ns
_ahead_ns = int(os.environ.get("JOB_COMPLETION_INDEX", "0")) * 60 * 10**9
time.time_ns = lambda: _read_ns() + _ahead_ns
