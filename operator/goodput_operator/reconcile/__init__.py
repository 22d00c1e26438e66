"""Reconciles one LLMService at a time: observe, decide, apply.

`observe` takes a `Snapshot` of the cluster, `decide` derives a `Decision` from it without I/O or a
clock, and `apply` carries out the decision.
"""
