"""The planner's assumed numbers, with the source of each. ``plan --assumptions`` prints them.

Each compute efficiency is chosen so that :mod:`training_speed` reproduces one published pre-training result. No result
of an RL system was used. docs/results/planner.md lists these results, and others that check the numbers.
"""

from dataclasses import dataclass, fields

from openrlhf_gtpo.tools.planner.cluster import GIB


@dataclass(frozen=True)
class Assumptions:
    """Values that :data:`SOURCES` explains. Fractions are of the data sheet's peak."""

    compute_bf16: float = 0.602
    compute_fp8: float = 0.488
    compute_experts: float = 0.2
    link: float = 0.75
    network: float = 0.8
    memory_bandwidth: float = 0.8
    decode_weights: float = 0.7
    decode_cache: float = 0.5
    decode_compute: float = 0.5
    decode_step: float = 1.5e-3
    decode_row: float = 37e-6
    collective: float = 10e-6
    host_copy: float = 20e9
    phase: float = 2.0
    context_bytes: float = 2.5 * GIB
    engine_bytes: float = 4.0 * GIB
    asleep_bytes: float = 1.5 * GIB
    usable: float = 0.95
    vllm_memory: float = 0.85
    vllm_memory_shared: float = 0.6
    vllm_rows: int = 1024
    vllm_tokens: int = 8192
    overlap: bool = True
    lm_head_mb: int = 1024


SOURCES = {
    "compute_bf16": "training in BF16: Llama 3's 8192 H100s, TP8 PP16, 430 TFLOP/s each (arXiv 2407.21783, table 4)",
    "compute_fp8": "training in FP8: Megatron-Bridge 25.11, Llama 3 8B on 8 H100s, 744 TFLOP/s each",
    "compute_experts": "training a mixture of experts: Megatron-Bridge 25.11, GPT-OSS 120B in BF16 on H100s, "
    "153 TFLOP/s, with the time of pipeline and all-to-all deducted; coarse",
    "link": "of NVLink's one-way bandwidth: NCCL's bus bandwidth in large all-reduces on H100s, about 340 of 450 GB/s",
    "network": "the same for InfiniBand: NCCL's 40 of 50 GB/s",
    "memory_bandwidth": "streaming reads and writes in the optimizer: assumed",
    "decode_weights": "bandwidth of weights in decoding: a little below gpt-fast's 72 to 76 % on A100 (PyTorch blog)",
    "decode_cache": "bandwidth of attention on the KV cache: TensorRT-LLM's rows for Llama 3.3 70B on H100 and H200",
    "decode_compute": "matrix products in prefill and large decode batches: fitted to the same rows",
    "decode_step": "seconds of scheduling and sampling in each of vLLM's decode steps: assumed",
    "decode_row": "seconds of vLLM's Python for each row of a decode step, where slower than the GPU: an H200's host, "
    "256 rows of 128 tokens without values, 1.21 s (benchmarks/results/h200/sampler_rollout.json)",
    "collective": "seconds of latency of a small all-reduce over NVLink: assumed",
    "host_copy": "bytes/s of pinned copies to host memory, which the GPUs of a node partly share: assumed",
    "phase": "seconds between two phases, including Ray's calls: assumed",
    "context_bytes": "bytes of CUDA contexts, NCCL and cuBLAS in trainer and engine: assumed",
    "engine_bytes": "bytes of vLLM's activations and CUDA graphs, besides weights and KV cache: assumed",
    "asleep_bytes": "bytes that a sleeping engine still holds: assumed",
    "usable": "usable share of the memory; fragmentation in the allocator takes the rest: assumed",
    "vllm_memory": "--vllm.gpu_memory_utilization when engines have their own GPUs",
    "vllm_memory_shared": "the same when they share GPUs with training (OpenRLHF's examples: 0.5 to 0.7)",
    "overlap": "whether gradients and weights are sent while passes run (--megatron.ddp): the actor's default",
    "vllm_rows": "--vllm.max_num_seqs, the most rows that an engine decodes at once; written by --emit",
    "vllm_tokens": "--vllm.max_num_batched_tokens, a batch in which compute bounds prefill; written by --emit",
    "lm_head_mb": "--megatron.lm_head_mb, working memory of the LM head: the actor's default; times ignore it",
}
assert set(SOURCES) == {field.name for field in fields(Assumptions)}
