"""Comparing finished runs: request by request, and as the evidence of a gate."""
