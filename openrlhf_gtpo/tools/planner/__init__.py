"""Predicts a run's memory and speed by arithmetic. Does not import torch, megatron or openrlhf."""
