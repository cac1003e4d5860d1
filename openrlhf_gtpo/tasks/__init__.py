"""Models and tasks that need no network. Depends on transformers and reasoning_gym, not on OpenRLHF, vLLM or Ray."""
