"""The report's drawings: arrays in, inline SVG out. None of them knows the page around it."""
