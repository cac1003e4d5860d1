"""vLLM engines and the weight transfer into them. Knows torch, vllm and ray; nothing of OpenRLHF."""
