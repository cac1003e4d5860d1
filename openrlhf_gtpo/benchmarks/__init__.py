"""Benchmarks: one harness, and one file per question. Only the command line imports this package."""
