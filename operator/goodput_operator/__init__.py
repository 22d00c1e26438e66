"""The operator and the local fleet: observe, decide and apply, for pods and for local processes.

`manager` is the process of the operator, and `local` the process of `goodput up`. Both use
`control`, which measures routers and engines. For a service in a cluster, `reconcile` decides and
applies, `render` renders the objects, and `kube` calls the API server. An import contract checks
that imports point one way.
"""
