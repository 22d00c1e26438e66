"""The operator's side of the control loop: measuring routers and engines, and pushing limits.

`admin_ports` sends HTTP requests, `readings` decodes the responses, and `measures` computes an
interval from two readings. No traffic, missing numbers and failed scrapes are distinct states. One
iteration of the loop is `goodput_core.control.control_step`.
"""
