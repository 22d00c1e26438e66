"""Paged KV memory: allocation of blocks, and the prefixes that free blocks still hold."""
