"""The operator in a cluster: watches, takes turns, writes; what to write is decided elsewhere.

Everything that knows Kopf, the Kubernetes client or a clock is in here, and nothing that knows
what a service needs: `goodput_operator.decide` is handed a snapshot and hands back actions.
"""
