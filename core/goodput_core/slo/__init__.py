"""Targets, request records, judging, windows, intervals and verdicts, for every component."""
