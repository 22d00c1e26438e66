"""The reconciliation of TraceReplays: observe, decide, apply.

`decide` and `jobs` are pure. `shards` speaks to armed shards, and `reconciler` to the API server.
All state is in the cluster, so a restarted operator continues where the last one stopped.
"""
