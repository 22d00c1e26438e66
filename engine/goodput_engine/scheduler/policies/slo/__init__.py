"""The `slo` policy and the pure functions on which its decisions are based."""
