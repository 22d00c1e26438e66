"""Scraping of the server's metrics during a run."""
