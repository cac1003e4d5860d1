"""Advantages, metrics and the loss of a rollout with entropies."""
