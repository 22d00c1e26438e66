"""Describe a trace: counted in one pass, shown as tables or JSON."""

from goodput_traces.describe.description import TraceDescription, describe

__all__ = ["TraceDescription", "describe"]
