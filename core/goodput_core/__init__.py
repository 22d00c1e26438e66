"""Goodput's values and decisions, shared by the engine, the replayer and the operator.

It needs only the standard library. Decisions read no clock and do no I/O, so the same law decides
in virtual time, on a laptop and in a cluster. Only the modules for processes and their files
(`dispatch`, `files`, `process`, `signals`, `spec.manifest`, `spec.schema`) touch the system.
"""
