"""Synthetic traces: from a seed alone (`two_classes`), or from a model of another trace (`like`).

Every draw comes from `random.Random(seed).random()`, whose sequence Python guarantees, so that
equal options give equal traces on every machine.
"""
