"""The scheduler: which requests compute how many tokens in the next step.

It sees lengths, block hashes, classes and deadlines. It must not know of text, token ids, true
output lengths, torch, sockets or clocks; nothing in it imports the executors or the messages.
"""
