"""The operator and the local fleet: observe, decide, apply, over pods and over processes.

Imports point one way, which an import contract checks. `manager` is the operator's process and
`local` that of `goodput up`. Both use `control`, which measures routers and engines. `reconcile`
decides and applies for a service in a cluster, `render` renders its objects, and `kube` calls the
API server.
"""
