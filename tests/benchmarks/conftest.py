"""Lets these tests import OpenRLHF on a host without CUDA, and shares what the integration tests have: a tiny model
with a tokenizer, and a Ray that must not start.
"""

from tests.training.conftest import actor_model, no_engine  # noqa: F401  # fixtures
