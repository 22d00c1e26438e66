"""OpenAI's API on the wire: bodies, headers, event streams and errors. It opens no socket."""
