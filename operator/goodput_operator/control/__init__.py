"""One interval of control over a service, the same for pods and for processes: pure.

What was measured goes in; the bounds to tell engines, the replicas to have and a sentence for
each change come out. No client, no clock, no process: whoever applies it is not known here.
"""
