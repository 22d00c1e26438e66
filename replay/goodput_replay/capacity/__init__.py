"""The highest rate at which promises are kept: `replay capacity`."""
