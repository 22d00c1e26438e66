"""Traces in the formats of other tools, with what they cannot hold said aloud."""
