"""Describe a trace in one pass, as tables or JSON."""

from goodput_traces.describe.description import TraceDescription, describe

__all__ = ["TraceDescription", "describe"]
