"""Handlers for `kopf run`, registered when this module is imported.

    kopf run --all-namespaces -m goodput_operator.manager.kopf_run

The options of `goodput operator` come from an environment variable, since Kopf's command line does
not pass on any. Namespaces must be the same in both: `-n team-a` and `--namespace team-a`.
"""

from __future__ import annotations

import os
import shlex
import signal

import kopf

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_operator.manager.cli import assemble
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.process import register_handlers

__all__: list[str] = []

register_handlers(
    kopf.get_default_registry(),
    parse_options(shlex.split(os.environ.get(ENV_OPERATOR_OPTIONS, ""))),
    assemble,
    # Kopf offers no other way to stop from within.
    ended=lambda: os.kill(os.getpid(), signal.SIGTERM),
)
