"""Metrics, plots and tables of runs. Knows no torch."""
