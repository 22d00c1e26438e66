"""Executors of plans: on a model of a device, or on a device."""
