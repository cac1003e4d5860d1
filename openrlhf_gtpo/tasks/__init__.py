"""Models and tasks that can be had without a network. Knows transformers and reasoning_gym, nothing of OpenRLHF, vLLM or Ray."""
