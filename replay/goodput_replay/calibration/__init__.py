"""Calibrate a device profile from the records of a run against any server."""
