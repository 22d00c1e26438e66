"""The Parquet trace format: schema, rules for rows, reader and writer."""
