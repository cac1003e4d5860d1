"""vLLM's engines: their memory, and the time of a rollout. A decode step takes as long as its reads of memory (a
roofline) or as vLLM's Python for its rows, whichever is longer."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt

from openrlhf_gtpo.model_shape import ModelShape, decoder_flops, forward_flops
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.cluster import Cluster
from openrlhf_gtpo.tools.planner.decoding import Stretch, decode
from openrlhf_gtpo.tools.planner.workload import Workload

_GOLDEN = (sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Engines:
    """Equal engines on ``gpus`` GPUs.

    Fields:
        tensor: GPUs of one engine.
        memory_share: the engine's share of each GPU's memory (``--vllm.gpu_memory_utilization``).
        item: bytes of a weight and of a cached element: 2 for this package's engines, 1 for published results in FP8.
    """

    shape: ModelShape
    cluster: Cluster
    gpus: int
    tensor: int
    memory_share: float
    workload: Workload
    assumptions: Assumptions
    item: int = 2

    @property
    def count(self) -> int:
        return self.gpus // self.tensor

    def memory(self) -> dict[str, float]:
        """Bytes on one GPU: ``vllm_weights``, ``vllm_working`` and ``kv_cache``, the rest, which may be negative."""
        weights = self.item * self.shape.parameters / self.tensor
        working = self.assumptions.engine_bytes
        cache = self.memory_share * self.cluster.gpu.memory - weights - working
        return {"vllm_weights": weights, "vllm_working": working, "kv_cache": cache}

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's keys and values on one GPU. GPUs beyond the number of key-value heads hold copies."""
        shares = min(self.tensor, self.shape.num_key_value_heads)
        return 2 * self.item * self.shape.num_layers * self.shape.key_value_width / shares

    @property
    def cache_tokens(self) -> float:
        """Capacity of one engine in tokens, over all its sequences."""
        return max(0.0, self.memory()["kv_cache"]) / self.token_bytes

    @property
    def fits(self) -> bool:
        """True if there is room for at least one row of maximum length."""
        return self.cache_tokens >= self.workload.row_length

    @property
    def rows(self) -> int:
        """Rows of a rollout on the fullest engine. All rows of a prompt are on one engine."""
        return -(-self.workload.prompts_per_step // self.count) * self.workload.samples_per_prompt

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The stretches of the rollout on the fullest engine."""
        work, rows = self.workload, self.rows
        lengths = work.lengths(rows)
        # A response's length does not depend on its arrival: multiples of the golden ratio mix lengths evenly.
        in_order = [ceil(lengths[i]) for i in sorted(range(rows), key=lambda i: i * _GOLDEN % 1)]
        most_rows = self.assumptions.vllm_rows
        return tuple(decode(in_order, work.prompt, work.samples_per_prompt, self.cache_tokens, most_rows))

    @property
    def most_rows(self) -> int:
        """Maximum rows that decode at once."""
        return max(stretch.rows for stretch in self.stretches)

    @property
    def recomputed(self) -> float:
        """Tokens recomputed because a full cache preempted their rows, as a fraction of all response tokens."""
        return sum(sum(stretch.again) for stretch in self.stretches) / (self.rows * self.workload.response)

    @cached_property
    def seconds(self) -> float:
        """Seconds of a rollout: prefill of each prompt once per engine (its samples share the cache), then decode
        steps until the last row ends."""
        prompts = self.rows / self.workload.samples_per_prompt
        seconds = prompts * self._prefill_seconds(self.workload.prompt)
        for stretch in self.stretches:
            seconds += stretch.steps * self._step(stretch.rows, stretch.context)
            seconds += sum(map(self._prefill_seconds, stretch.again))
        return seconds

    def saturated(self) -> float:
        """Generated tokens per second and GPU under a constant load, with rows waiting."""
        work = self.workload
        context = work.prompt + work.response / 2
        rows = min(self.rows, self.assumptions.vllm_rows, self.cache_tokens / context)
        prompts = rows / work.response / work.samples_per_prompt  # prompts that arrive in a step
        return rows / (self._step(rows, context) + prompts * self._prefill_seconds(work.prompt)) / self.tensor

    def _prefill_seconds(self, tokens: float) -> float:
        """Seconds of one row's prefill."""
        return decoder_flops(self.shape, [int(tokens)]) / self.tensor / self._multiply_rate()

    def _multiply_rate(self) -> float:
        gpu = self.cluster.gpu
        return (gpu.bf16 if self.item == 2 or gpu.fp8 is None else gpu.fp8) * self.assumptions.decode_compute

    def _step(self, rows: float, context: float) -> float:
        """Seconds of a decode step, one token for each of ``rows`` sequences of ``context`` tokens. Products are bound
        by reading weights or by compute. Then attention reads the cache. Meanwhile vLLM's Python prepares the next
        step (asynchronous scheduling), so the longer of the two counts."""
        shape, gpu, assumed = self.shape, self.cluster.gpu, self.assumptions
        read = self._weights_read(rows) / self.tensor / (gpu.memory_bandwidth * assumed.decode_weights)
        flops = rows * forward_flops(shape, [1], 1) / self.tensor
        cache = rows * context * self.token_bytes / (gpu.memory_bandwidth * assumed.decode_cache)
        sums = 2 * shape.num_layers if self.tensor > 1 else 0
        sent = 2 * 2 * rows * shape.hidden_size * (self.tensor - 1) / self.tensor
        exchanged = sums * (assumed.collective + sent / (gpu.link * assumed.link))
        on_gpu = max(read, flops / self._multiply_rate()) + cache + exchanged + assumed.decode_step
        return max(on_gpu, rows * assumed.decode_row)

    def _weights_read(self, rows: float) -> float:
        """Bytes of weights that a decode step reads on all GPUs. Only experts that some row is routed to count."""
        shape = self.shape
        # The embedding is only looked up.
        weights = self.item * (shape.parameters - (0 if shape.tied else shape.vocab_size * shape.hidden_size))
        if not shape.num_experts:
            return weights
        experts = self.item * shape.num_layers * shape.layer_parameters()["experts"]
        missed = (1 - shape.experts_per_token / shape.num_experts) ** rows
        return weights - experts * missed
