"""Grids of training runs, methods × settings × seeds: what a file asks for, its runs, and what they found."""
