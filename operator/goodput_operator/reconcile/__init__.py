"""Reconciles one LLMService at a time: observe, decide, apply.

`observe` freezes the cluster's state in a `Snapshot`, `decide` turns it into a `Decision` without
I/O or a clock, and `apply` carries the decision out.
"""
