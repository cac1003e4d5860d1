"""Sampling: OpenRLHF's vLLM actor, its rewards, and the order and seeds of requests."""
