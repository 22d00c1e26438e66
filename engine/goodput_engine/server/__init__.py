"""The engine's HTTP front: OpenAI's API on one port, metrics and control on another."""
