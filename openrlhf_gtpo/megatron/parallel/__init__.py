"""Ranks: layouts, process groups, and hosts without CUDA."""
