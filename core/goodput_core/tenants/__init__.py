"""Tenants of a service: their keys, and their fair share of the replicas under overload."""
