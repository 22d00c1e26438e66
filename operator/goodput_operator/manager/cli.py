"""`goodput operator`: creates the operator and runs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from goodput_operator.control.admin_ports import Scraper
from goodput_operator.control.pod_measures import PodMeasures
from goodput_operator.kube.fence import SystemClock
from goodput_operator.manager.options import parse_options
from goodput_operator.manager.process import run_operator
from goodput_operator.manager.runtime import Operator
from goodput_operator.reconcile.decide import decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_operator.manager.options import Options

__all__ = ["assemble", "main"]


def assemble(options: Options, ended: Callable[[], None]) -> Operator:
    """Create the operator of the command line.

    Args:
        options: its settings.
        ended: called when it fails.
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


def main(argv: list[str]) -> int:
    """Run the LLMServices of a cluster until stopped.

    Returns:
        0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        GoodputError: the operator could not start, or failed.
    """
    return run_operator(parse_options(argv), assemble)
