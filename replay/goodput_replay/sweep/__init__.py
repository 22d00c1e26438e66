"""Which policy, which budget, how many replicas: `goodput policies`."""
