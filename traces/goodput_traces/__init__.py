"""Traces of requests: the Parquet format, importers and exporters, transforms, synthesis.

The replayer reads traces with `goodput_traces.format.reader.open_trace` and transforms them with
`goodput_traces.transforms`. This package must not depend on engines or HTTP.
"""
