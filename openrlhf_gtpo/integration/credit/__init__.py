"""From a rollout with entropies to advantages, metrics and the loss."""
