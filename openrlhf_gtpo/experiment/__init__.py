"""Grids of training runs, methods × settings × seeds: what a file asks for, and its runs one after another."""
