"""Targets, request records, judging, intervals and verdicts: the one judge of every component."""
