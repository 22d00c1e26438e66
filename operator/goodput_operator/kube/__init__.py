"""Access to the Kubernetes API: objects, client, cache, watches and the Lease.

It imports nothing of what is reconciled or rendered.
"""
