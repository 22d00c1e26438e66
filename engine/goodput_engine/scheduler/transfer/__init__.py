"""KV transfer between replicas, used only by fleets in virtual time."""
