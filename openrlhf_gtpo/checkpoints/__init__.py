"""Checkpoints of both backends: folders, manifests, checksums, and how ranks agree about them."""
