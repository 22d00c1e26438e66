"""Traces of requests: the Parquet format, importers and exporters, transforms, synthesis.

The replayer reads traces through `goodput_traces.reader.open_trace` and shapes them with
`goodput_traces.transforms`; this package knows nothing of targets, engines or HTTP.
"""
