"""The operator for `kopf run`: importing this module registers its handlers.

    kopf run --all-namespaces -m goodput_operator.manager.kopf_run

Options come from the environment, as those of `goodput operator`, which is otherwise the same.
"""

from __future__ import annotations

import os
import shlex

from goodput_core.contract import ENV_OPERATOR_OPTIONS
from goodput_operator.manager.assembly import assemble
from goodput_operator.manager.under_kopf import register

__all__: list[str] = []

register(shlex.split(os.environ.get(ENV_OPERATOR_OPTIONS, "")), assemble)
