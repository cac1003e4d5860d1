"""Models and tasks that need no network. Knows transformers and reasoning_gym, nothing of OpenRLHF, vLLM or Ray."""
