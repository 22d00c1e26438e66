"""The fleet in virtual time: the real scheduler, engine core and placement on emulated devices.

`emulate` serves requests without files, sockets or a clock. `virtual_time` runs it for
`replay --emulate` and writes the run folder.
"""
