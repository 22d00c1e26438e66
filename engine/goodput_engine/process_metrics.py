"""Metrics of the process itself, which engines and routers publish beside their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Gauge, ProcessCollector

from goodput_core.cli import installed_version
from goodput_core.contract import LABEL_LLMSERVICE, LABEL_ROLE, LABEL_VERSION, METRIC_BUILD_INFO

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["register_process_metrics"]


def register_process_metrics(registry: CollectorRegistry, *, llmservice: str, role: str) -> None:
    """Add the version of Goodput, and CPU time, memory and open files of the process."""
    labels = (LABEL_LLMSERVICE, LABEL_ROLE, LABEL_VERSION)
    info = Gauge(METRIC_BUILD_INFO, "1, with the version of Goodput.", labels, registry=registry)
    info.labels(llmservice, role, installed_version()).set(1)
    ProcessCollector(registry=registry)
