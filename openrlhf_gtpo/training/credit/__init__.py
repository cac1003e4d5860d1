"""Turns a rollout with entropies into advantages, metrics and the loss."""
