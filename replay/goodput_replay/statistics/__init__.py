"""The statistics of one run: from records to the evidence that a verdict is decided on.

numpy lives here and not in core: core states the rules (`goodput_core.slo.verdict`), this package
resamples for them. Nothing here reads a file, a clock or global randomness.
"""
