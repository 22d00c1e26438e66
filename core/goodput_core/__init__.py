"""Goodput's pure values and decisions: the standard library only, no I/O, no clock reads.

Everything that the engine, the replayer and the operator must agree on lives here, so that
the same law decides in virtual time, on a laptop and in a cluster.
"""
