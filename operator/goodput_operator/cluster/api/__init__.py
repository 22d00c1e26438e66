"""Talking with the API server: calls and refusals, watches, the Lease and the fence behind it.

What is asked for and why is not known here; nothing of `turns` is imported.
"""
