"""Handlers for `kopf run`, registered when this module is imported.

    kopf run --all-namespaces -m goodput_operator.manager.kopf_run

The options of `goodput operator` are read from an environment variable, since Kopf's command line
accepts only its own options. Both command lines must name the same namespaces: for example `-n
team-a` for Kopf, and `--namespace team-a` in the variable.
"""

from __future__ import annotations

import os
import shlex
import signal

import kopf

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_operator.manager.cli import create_operator, register_handlers
from goodput_operator.manager.options import parse_options

__all__: list[str] = []

register_handlers(
    kopf.get_default_registry(),
    create_operator(
        parse_options(shlex.split(os.environ.get(ENV_OPERATOR_OPTIONS, ""))),
        # A handler has no other way to stop `kopf run`.
        on_failure=lambda: os.kill(os.getpid(), signal.SIGTERM),
    ),
)
