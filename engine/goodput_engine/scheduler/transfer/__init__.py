"""KV transfer between replicas: what only a fleet in virtual time uses."""
