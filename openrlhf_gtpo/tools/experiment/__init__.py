"""Grids of training runs (methods × settings × seeds): the file that asks for one, its runs, and their results."""
