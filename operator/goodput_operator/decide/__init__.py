"""From what is seen of one service in the cluster to what is to be done: pure, level-triggered.

No client, no clock, no Kopf: plain values in, plain values out, so that a test builds both by hand
and what an operator decided can be decided again.
"""
