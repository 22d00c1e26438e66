"""The fleet in virtual time: the real scheduler, engine core and placement on modelled devices.

Nothing here reads a clock, opens a socket or waits. `fleet` and what it uses are a library
without files or console; `command` is what `replay --emulate` runs.
"""
