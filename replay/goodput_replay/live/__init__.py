"""A run while it is sent: its counts, the terminal display and the live page."""
