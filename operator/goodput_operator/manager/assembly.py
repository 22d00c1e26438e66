"""Which decisions and which measures the operator is made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from goodput_operator.control.admin_ports import Scraper
from goodput_operator.control.pod_measures import PodMeasures
from goodput_operator.kube.fence import SystemClock
from goodput_operator.manager.runtime import Operator
from goodput_operator.reconcile.decide import decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.manager.options import Options

__all__ = ["assemble"]


def assemble(options: Options, ended: Callable[[], None]) -> Operator:
    """The operator of the command line.

    Args:
        options: how it runs.
        ended: called when it ends by itself.
    """
    installation = options.installation
    return Operator(
        options,
        decide=partial(decide, installation=installation),
        measure=lambda session: PodMeasures(
            Scraper(session), prometheus_urls=installation.prometheus_urls
        ),
        clock=SystemClock(),
        ended=ended,
    )
