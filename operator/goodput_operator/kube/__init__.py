"""Access to the Kubernetes API: objects, client, cache, watches and the Lease.

It imports neither `reconcile` nor `render`.
"""
