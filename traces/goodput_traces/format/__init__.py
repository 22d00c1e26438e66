"""The Parquet trace format: its schema, its rules, a reader and a writer."""
