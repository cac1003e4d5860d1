"""Checkpoints of either backend: folders, manifests, checksums, and what ranks agree on about them."""
