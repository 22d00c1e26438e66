"""Sweeps over rates (`replay capacity`) and over configurations (`goodput policies`)."""
