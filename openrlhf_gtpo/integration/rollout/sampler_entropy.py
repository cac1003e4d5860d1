"""What vLLM's sampler says of each token beside its id: log-prob and entropy of the distribution that it came from.

In the place of vLLM's own passes for log-probs there is one over the raw logits, before anything changes them: the
distribution is the policy's, softmax(logits / temperature) over the whole vocabulary, also where ``min_tokens`` bans
an end of sequence. Requests that want no log-probs are sampled as ever.

The entropy travels to the request's output in the place of the sampled token's rank: vLLM carries those, 64-bit
integers, through its processes as they are and makes nothing of them. ``_TAG`` tells one from a rank.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

from openrlhf_gtpo.lm_head import log_prob_and_entropy

_TAG = 1 << 32  # above it the 32 bits of a float; no vocabulary has a rank as high


def entropies(ranks: list[int]) -> np.ndarray:
    """(n,) float32 entropies in nats that tokens carry as their ranks; NaN for a rank that is one."""
    tagged = np.array(ranks, dtype=np.int64) - _TAG
    return np.where(tagged < 0, np.float32("nan"), tagged.astype(np.uint32).view(np.float32))


def token_values(logits: Tensor, sampled: Tensor, temperature: float) -> LogprobsTensors:
    """What vLLM expects of ``logits`` (N, V) and the tokens ``sampled`` (N,) from them."""
    sampled = sampled.long()
    log_probs, entropy = log_prob_and_entropy(logits, sampled, temperature=temperature)
    ranks = _TAG + (entropy.view(torch.int32).long() & 0xFFFFFFFF)
    return LogprobsTensors(sampled.int().unsqueeze(1), log_probs.unsqueeze(1), ranks)


class EntropySampler(Sampler):
    """That of vLLM's V1 model runner, on CPU and CUDA."""

    temperature: float

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_metadata.max_num_logprobs is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        raw = logits.clone() if logits.dtype == torch.float32 else logits  # float32 ones are changed in place
        without = replace(sampling_metadata, max_num_logprobs=None, logprob_token_ids=None)
        output = super().forward(logits, without, *args, **kwargs)
        output.logprobs_tensors = token_values(raw, output.sampled_token_ids[:, 0], self.temperature)
        return output


class EntropySamplerV2(SamplerV2):
    """That of vLLM's V2 model runner, which works on a copy of the logits wherever it changes them."""

    temperature: float

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> None:
        """None: vLLM's own passes are not wanted."""

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        output = super().__call__(logits, input_batch)
        if super().get_logprobs_dims(input_batch.idx_mapping_np) is not None:
            output.logprobs_tensors = token_values(logits, output.sampled_token_ids[:, 0], self.temperature)
        return output


_WITH_ENTROPY = {Sampler: EntropySampler, SamplerV2: EntropySamplerV2}


class CapturesEntropy:
    """Mixed into vLLM's worker (``worker_extension_cls``), which owns ``model_runner``."""

    model_runner: Any

    def capture_entropy(self, temperature: float) -> str | None:
        """From now on who asks for log-probs gets them with entropies, at ``temperature``.

        Returns the name of the sampler's class where it is none of those that this knows, and leaves it as it is.
        """
        sampler = self.model_runner.sampler
        if type(sampler) not in _WITH_ENTROPY:
            return f"{type(sampler).__module__}.{type(sampler).__qualname__}"
        assert self.model_runner.vllm_config.speculative_config is None, "drafts have a sampler of their own"
        sampler.__class__ = _WITH_ENTROPY[type(sampler)]
        sampler.temperature = temperature
        return None
