"""The router: spreads requests over replicas and counts what became of each one."""
