"""Samplers for vLLM that report each token's log-prob, and the entropy of the distribution that it came from.

One pass over the raw logits, before anything changes them, replaces vLLM's own passes for log-probs: the distribution
is the policy's, softmax(logits / temperature) over the whole vocabulary, even if ``min_tokens`` bans an end of
sequence. Requests that want no log-probs are sampled as usual.

The entropy travels to the request's output in place of the sampled token's rank, with the version of the weights above
it: vLLM carries ranks, which are 64-bit integers, through its processes unchanged and makes no use of them.

Imported on demand: another version of vLLM may lack these samplers, and the entropies then come from the actor.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

from openrlhf_gtpo.lm_head import log_prob_and_entropy
from openrlhf_gtpo.training.features.sampler_entropy.answers import ENTROPY_TAG


def sampled_logprobs(logits: Tensor, sampled: Tensor, temperature: float, version: int) -> LogprobsTensors:
    """What vLLM expects for ``logits`` (N, V) and the tokens ``sampled`` (N,) from them, with entropies, and the
    ``version`` of the weights, as ranks."""
    sampled = sampled.long()
    log_probs, entropy = log_prob_and_entropy(logits, sampled, temperature=temperature)
    ranks = (1 + version) * ENTROPY_TAG + (entropy.view(torch.int32).long() & 0xFFFFFFFF)
    return LogprobsTensors(sampled.int().unsqueeze(1), log_probs.unsqueeze(1), ranks)


class EntropySampler(Sampler):
    """Sampler for vLLM's V1 model runner, on CPU and CUDA, that reports entropies."""

    temperature: float
    version: Callable[[], int]

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_metadata.max_num_logprobs is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        raw = logits.clone() if logits.dtype == torch.float32 else logits  # float32 logits are changed in place
        without = replace(sampling_metadata, max_num_logprobs=None, logprob_token_ids=None)
        output = super().forward(logits, without, *args, **kwargs)
        sampled = output.sampled_token_ids[:, 0]
        output.logprobs_tensors = sampled_logprobs(raw, sampled, self.temperature, self.version())
        return output


class EntropySamplerV2(SamplerV2):
    """Sampler for vLLM's V2 model runner that reports entropies; the runner changes the logits only in a copy."""

    temperature: float
    version: Callable[[], int]

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> None:
        """None: vLLM's own passes are not wanted."""

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        output = super().__call__(logits, input_batch)
        if super().get_logprobs_dims(input_batch.idx_mapping_np) is not None:
            sampled = output.sampled_token_ids[:, 0]
            output.logprobs_tensors = sampled_logprobs(logits, sampled, self.temperature, self.version())
        return output


_WITH_ENTROPY = {Sampler: EntropySampler, SamplerV2: EntropySamplerV2}


def capture(model_runner: Any, temperature: float, version: Callable[[], int]) -> str | None:
    """Have the sampler of vLLM's ``model_runner`` report entropies, at ``temperature``, to requests for log-probs, and
    what ``version`` says of the weights at each step.

    A sampler of an unknown class is left as it is, and the name of the class is returned.
    """
    sampler = model_runner.sampler
    if type(sampler) not in _WITH_ENTROPY:
        return f"{type(sampler).__module__}.{type(sampler).__qualname__}"
    assert model_runner.vllm_config.speculative_config is None, "drafts have a sampler of their own"
    sampler.__class__ = _WITH_ENTROPY[type(sampler)]
    sampler.temperature, sampler.version = temperature, version
    return None
