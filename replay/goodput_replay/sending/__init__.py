"""Real-time sending: target checks, timers, prepared bodies, the send loop and its abort."""
