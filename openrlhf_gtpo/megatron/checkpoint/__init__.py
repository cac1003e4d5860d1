"""Checkpoints: written, read, rotated, converted and exported."""
