"""What routers and engines count, from their answers to one interval's measures.

Gathering (sockets, time-outs) stands apart from decoding (bytes to readings) and from
differencing (two readings to an interval): the last two are pure. No traffic, missing numbers and
failed scrapes stay three states all the way.
"""
