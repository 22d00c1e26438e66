"""The operator for `kopf run`: importing this module registers its handlers.

    kopf run --all-namespaces -m goodput_operator.cluster.kopf_run

Options come from the environment, as those of `goodput operator`, which is otherwise the same.
"""

from __future__ import annotations

import os
import shlex
import signal

import kopf

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_operator.cluster.assembly import assemble
from goodput_operator.cluster.options import parse_options
from goodput_operator.cluster.wiring import wire

__all__: list[str] = []

wire(
    kopf.get_default_registry(),
    parse_options(shlex.split(os.environ.get(ENV_OPERATOR_OPTIONS, ""))),
    assemble,
    # Kopf has no other way to be told from within that it must end.
    ended=lambda: os.kill(os.getpid(), signal.SIGTERM),
)
