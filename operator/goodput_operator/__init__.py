"""Looks after a service: on this machine today, in a cluster with the operator."""
