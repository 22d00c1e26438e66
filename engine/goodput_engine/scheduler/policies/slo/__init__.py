"""The `slo` policy and the pure functions that it decides with."""
