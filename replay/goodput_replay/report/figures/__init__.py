"""Drawings of the report: arrays in, inline SVG out."""
