"""Metrics, plots and tables of runs. Does not import torch."""
