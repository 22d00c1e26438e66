"""HTTP client of a replay: sends one request, reads its stream and returns its record."""
