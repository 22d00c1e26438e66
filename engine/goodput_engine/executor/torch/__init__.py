"""The executor that computes real models with torch; only this package imports torch."""
