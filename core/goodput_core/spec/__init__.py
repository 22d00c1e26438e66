"""The custom resources as validated dataclasses: a dict in, a value or a `SpecError` out."""
