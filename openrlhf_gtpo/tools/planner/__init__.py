"""Predicts by arithmetic alone what a run needs and how fast it is. Imports no torch, megatron or openrlhf."""
