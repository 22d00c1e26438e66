"""Paged KV memory: which blocks are whose, and which still hold a reusable prefix."""
