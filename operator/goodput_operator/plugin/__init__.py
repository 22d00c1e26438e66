"""`kubectl goodput`: services, decisions and gates of a cluster on a terminal.

The plugin runs kubectl for each request, so it has the contexts, credentials and rights of the
user's kubectl, and needs no client library. It only reads.
"""
