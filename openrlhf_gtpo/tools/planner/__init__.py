"""Predicts by arithmetic a run's memory and speed. Does not import torch, megatron or openrlhf."""
