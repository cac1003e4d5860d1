"""A training step: schedule, optimizer, offload."""
