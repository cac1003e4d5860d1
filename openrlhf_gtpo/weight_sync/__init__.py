"""The weight transfer from a trainer to vLLM engines: buckets, broadcast, CUDA IPC, receipts. Knows torch, vllm and ray."""
