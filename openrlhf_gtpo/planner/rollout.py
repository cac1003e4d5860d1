"""vLLM's engines: what they hold, and how long a rollout takes from the bytes that each decode step reads (a roofline)."""

from dataclasses import dataclass

from openrlhf_gtpo.planner.assumptions import Assumptions
from openrlhf_gtpo.planner.cluster import Cluster
from openrlhf_gtpo.planner.shape import ModelShape, decoder_flops, forward_flops
from openrlhf_gtpo.planner.workload import Workload


@dataclass(frozen=True)
class Engines:
    """Equal engines on ``gpus`` GPUs.

    Fields:
        tensor: GPUs of one engine.
        memory_share: of each GPU's memory (``--vllm.gpu_memory_utilization``).
        item: bytes of a weight and of a cached element; 2 of this package's engines, 1 of published rows in FP8.
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
        """On one GPU: ``vllm_weights``, ``vllm_working`` and ``kv_cache``, which is what is left and may be below zero."""
        weights = self.item * self.shape.parameters / self.tensor
        working = self.assumptions.engine_bytes
        return {
            "vllm_weights": weights,
            "vllm_working": working,
            "kv_cache": self.memory_share * self.cluster.gpu.memory - weights - working,
        }

    @property
    def token_bytes(self) -> float:
        """Of one token's keys and values on one GPU; where GPUs outnumber key-value heads, they hold copies."""
        shares = min(self.tensor, self.shape.num_key_value_heads)
        return 2 * self.item * self.shape.num_layers * self.shape.key_value_width / shares

    @property
    def cache_tokens(self) -> float:
        """Of all sequences together that one engine has room for."""
        return max(0.0, self.memory()["kv_cache"]) / self.token_bytes

    @property
    def fits(self) -> bool:
        """Room for at least one longest row."""
        return self.cache_tokens >= self.workload.row_length

    @property
    def rows(self) -> float:
        """Of a rollout on the engine with the most."""
        return -(-self.workload.rows // self.count)

    @property
    def concurrent(self) -> float:
        """Rows that an engine decodes at once."""
        work = self.workload
        return min(self.rows, self.assumptions.vllm_rows, self.cache_tokens / (work.prompt + work.response / 2))

    def seconds(self) -> float:
        """Of the whole rollout: prefill of each prompt once an engine (its samples share the cache), full batches while rows
        wait, then a batch that shrinks to the longest row."""
        work = self.workload
        waves = self.rows / self.concurrent
        waiting = 0.0
        if waves > 1:
            waiting = (waves - 1) * work.response * self._step(self.concurrent, work.prompt + work.response / 2)
        return self._prefill() + waiting + self._until_the_longest()

    def _until_the_longest(self) -> float:
        lengths, at, seconds = self.workload.responses, 0.0, 0.0
        for i, length in enumerate(lengths):
            alive = self.concurrent * (len(lengths) - i) / len(lengths)
            seconds += (length - at) * self._step(alive, self.workload.prompt + (length + at) / 2)
            at = length
        return seconds

    def saturated(self) -> float:
        """Generated tokens a second on each GPU while rows wait and finish evenly."""
        work = self.workload
        step = self._step(self.concurrent, work.prompt + work.response / 2)
        prompts = self.concurrent / work.response / work.samples_per_prompt  # that come in at a step
        return self.concurrent / (step + prompts * self._prompt_seconds()) / self.tensor

    def _prefill(self) -> float:
        return max(1.0, self.rows / self.workload.samples_per_prompt) * self._prompt_seconds()

    def _prompt_seconds(self) -> float:
        return decoder_flops(self.shape, [int(self.workload.prompt)]) / self.tensor / self._multiply_rate()

    def _multiply_rate(self) -> float:
        gpu = self.cluster.gpu
        return (gpu.bf16 if self.item == 2 or gpu.fp8 is None else gpu.fp8) * self.assumptions.decode_compute

    def _step(self, rows: float, context: float) -> float:
        """One token for each of ``rows`` sequences of ``context`` tokens. Products either wait for weights or multiply; then
        attention reads the cache."""
        shape, gpu, assumed = self.shape, self.cluster.gpu, self.assumptions
        read = self._weights_read(rows) / self.tensor / (gpu.memory_bandwidth * assumed.decode_weights)
        flops = rows * forward_flops(shape, [1], 1) / self.tensor
        cache = rows * context * self.token_bytes / (gpu.memory_bandwidth * assumed.decode_cache)
        sums = 2 * shape.num_layers if self.tensor > 1 else 0
        sent = 2 * 2 * rows * shape.hidden_size * (self.tensor - 1) / self.tensor
        exchanged = sums * (assumed.collective + sent / (gpu.link * assumed.link))
        return max(read, flops / self._multiply_rate()) + cache + exchanged + assumed.decode_step

    def _weights_read(self, rows: float) -> float:
        """Bytes over all GPUs; of experts, those that some row is given to."""
        shape = self.shape
        # The embedding is looked up, not read.
        weights = self.item * (shape.parameters - (0 if shape.tied else shape.vocab_size * shape.hidden_size))
        if not shape.num_experts:
            return weights
        experts = self.item * shape.num_layers * shape.layer_parameters()["experts"]
        missed = (1 - shape.experts_per_token / shape.num_experts) ** rows
        return weights - experts * missed
