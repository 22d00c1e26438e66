"""The engine's HTTP server: OpenAI's API on one port, metrics and control on another."""
