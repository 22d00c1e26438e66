"""A run's folder: the records, the summary, and what a person reads of them."""
