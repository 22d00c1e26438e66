"""Executors of plans, on an emulated device or on a real one."""
