"""The objects that one service needs in a cluster, rendered as plain dictionaries.

Functions of values: no client, no clock, no Kopf. What is there already, and whether it may be
touched, is not known here.
"""
