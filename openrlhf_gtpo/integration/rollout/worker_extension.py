"""What vLLM's workers are extended with: upstream's own updates (CUDA IPC, Ray transfer), the bucketed transfer, and
samplers that give entropies.

vLLM imports this by name in its engine processes, which Ray's worker hook does not reach.
"""

from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from openrlhf_gtpo.integration.rollout.sampler_entropy import CapturesEntropy
from openrlhf_gtpo.platform.memory import ReportsPeakMemory
from openrlhf_gtpo.weight_sync.receiver import WeightReceiver


class WorkerExtension(WeightReceiver, WorkerWrap, ReportsPeakMemory, CapturesEntropy):
    """Their method names differ."""
