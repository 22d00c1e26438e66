"""The operator's side of the control loop: measuring routers and engines, and pushing limits.

`admin_ports` talks HTTP, `readings` decodes and `measures` turns two readings into an interval;
the last two are pure. No traffic, missing numbers and failed scrapes stay three states throughout.
The body of the loop is `goodput_core.control.control_step`.
"""
