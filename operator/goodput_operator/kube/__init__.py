"""Access to the Kubernetes API: objects, client, cache, watches and the Lease.

This package imports neither `reconcile` nor `render`.
"""
