"""A live page of a running service, from the admin ports of its router and its engines."""
