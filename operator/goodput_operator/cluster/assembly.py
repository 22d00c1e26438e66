"""Which decisions and which measures the operator is made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from goodput_operator.cluster.clock import SystemClock
from goodput_operator.cluster.runtime import Operator
from goodput_operator.decide.deciding import decide
from goodput_operator.measure.gathering import Gatherer
from goodput_operator.measure.services import ServiceMeasures

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.cluster.options import Options

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
        measure=lambda session: ServiceMeasures(
            Gatherer(session), prometheus_urls=installation.prometheus_urls
        ),
        clock=SystemClock(),
        ended=ended,
    )
