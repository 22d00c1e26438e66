"""The scheduler: it selects the requests and the number of tokens that the next step computes.

It has access to lengths, block hashes, classes and deadlines, but must not have access to text,
token ids, true output lengths, torch, sockets or clocks. No module in it imports the executors or
the messages.
"""
