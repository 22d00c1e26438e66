"""The scheduling policies of this version, a module each."""
