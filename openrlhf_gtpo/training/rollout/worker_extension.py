"""The extension of vLLM's workers: upstream's updates (CUDA IPC, Ray transfer), the bucketed transfer, and samplers
that report entropies.

vLLM imports it by name in its engine processes, which Ray's worker hook does not reach.
"""

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from openrlhf_gtpo.platform.memory import ReportsPeakMemory
from openrlhf_gtpo.weight_sync.receiver import WeightReceiver


class WorkerExtension(WeightReceiver, WorkerWrap, ReportsPeakMemory):
    """Methods that vLLM's worker gets: from three base classes, which have no name in common, and one of its own."""

    def capture_entropy(self, temperature: float) -> str | None:
        """See ``vllm_sampler.capture``."""
        from openrlhf_gtpo.training.features.sampler_entropy import vllm_sampler

        return vllm_sampler.capture(self.model_runner, temperature, lambda: self.weights_version)
