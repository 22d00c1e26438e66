"""Other people's trace formats, one module each, and the import that drives them."""
