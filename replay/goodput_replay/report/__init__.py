"""The HTML report of a run: one self-contained page, rebuilt at any time from the folder."""
