"""One request over HTTP: send it, read its stream, say what happened. Knows no trace."""
