"""The workload of one training step: the number of responses, their lengths, and the optimizer steps."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from openrlhf_gtpo.errors import SettingError

# Sigma of log-lengths. The longest of a few hundred responses is about ten times the median, as in reasoning models.
_TAIL = 0.9
_POINTS = 200


@dataclass(frozen=True)
class Workload:
    """The workload of a step. Defaults are the launch scripts', except the micro-batch size, which is OpenRLHF's.

    Fields:
        prompt_length, response_length: maximum tokens of a prompt, and of a response.
        mean_prompt: mean tokens of a prompt; None for half of the maximum.
        mean_response: mean tokens of a response; None for the mean if the median is a sixth of the maximum.
        samples_per_prompt, prompts_per_step: responses to a prompt, and prompts of a rollout.
        train_batch: responses in an optimizer step; None for all.
        max_tokens_per_gpu: maximum tokens of a micro-batch on a GPU, or of its part of the longest row if that is
            longer.
        kl: a reference model also scores the responses; with ``entropy`` sampler, KL is a loss.
        entropy, log_probs: "actor" or "sampler", as in the trainer's flags.
    """

    prompt_length: int = 2048
    response_length: int = 4096
    mean_prompt: float | None = None
    mean_response: float | None = None
    samples_per_prompt: int = 16
    prompts_per_step: int = 128
    train_batch: int | None = None
    max_tokens_per_gpu: int = 16192
    kl: bool = False
    entropy: str = "actor"
    log_probs: str = "actor"

    def __post_init__(self) -> None:
        for part in ("prompt", "response"):
            mean, most = getattr(self, f"mean_{part}"), getattr(self, f"{part}_length")
            if mean is not None and not 1 <= mean <= most:
                raise SettingError(f"$mean_{part} {mean:g} must be between 1 and ${part}_length {most}.")
        if self.log_probs == "sampler" != self.entropy:
            raise SettingError(
                "$log_probs sampler skips the forward pass that computes entropies; give $entropy sampler too."
            )
        if self.rows % self.batch:
            raise SettingError(
                f"$train_batch {self.batch} does not divide the {self.rows} responses of a step "
                f"($prompts_per_step {self.prompts_per_step} × $samples_per_prompt {self.samples_per_prompt})."
            )

    @property
    def rows(self) -> int:
        """Responses of a rollout."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def batch(self) -> int:
        """Responses of an optimizer step."""
        return self.train_batch or self.rows

    @property
    def optimizer_steps(self) -> int:
        return self.rows // self.batch

    @property
    def scorings(self) -> int:
        """Forward passes over all rows before training, by the policy and the reference model, without audits."""
        policy = self.entropy == "actor" or (self.optimizer_steps > 1 and self.log_probs == "actor")
        return policy + self.kl

    @property
    def row_length(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_length + self.response_length

    def micro_batch_tokens(self, context: int) -> int:
        """Maximum tokens in a micro-batch whose sequences ``context`` GPUs share."""
        return max(self.max_tokens_per_gpu * context, self.row_length)

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.prompt_length / 2 if self.mean_prompt is None else self.mean_prompt

    @cached_property
    def responses(self) -> tuple[float, ...]:
        """Lengths of responses at evenly spaced ranks, ascending: log-normal, truncated at the limit."""
        if self.mean_response is None:
            return self._cut(self.response_length / 6)
        low, high = self.mean_response / 50, self.response_length * 1e6
        for _ in range(80):  # the mean grows with the median
            median = math.sqrt(low * high)
            mean = sum(self._cut(median)) / _POINTS
            low, high = (median, high) if mean < self.mean_response else (low, median)
        return self._cut(high)

    @property
    def response(self) -> float:
        """Mean tokens of a response."""
        return sum(self.responses) / len(self.responses)

    @property
    def tokens(self) -> float:
        """Tokens of a step without padding. A prompt counts with every response, as training computes it."""
        return self.rows * (self.prompt + self.response)

    def lengths(self, rows: int) -> list[float]:
        """Lengths of ``rows`` responses, at evenly spaced ranks, ascending."""
        return [self.responses[(2 * i + 1) * _POINTS // (2 * rows)] for i in range(rows)]

    def micro_batches(self, replicas: int, context: int) -> tuple[int, float]:
        """Number of micro-batches of a replica in an optimizer step, and the mean tokens computed in each."""
        return _first_fit(self, max(1, self.batch // replicas), self.micro_batch_tokens(context))

    def _cut(self, median: float) -> tuple[float, ...]:
        normal = NormalDist(math.log(median), _TAIL)
        ranks = ((i + 0.5) / _POINTS for i in range(_POINTS))
        return tuple(min(self.response_length, max(1.0, math.exp(normal.inv_cdf(rank)))) for rank in ranks)


@cache
def _first_fit(work: Workload, rows: int, most: int) -> tuple[int, float]:
    """Number of micro-batches from ``rows`` responses, packed longest first, and the mean tokens in each."""
    sums: list[float] = []
    for length in reversed(work.lengths(rows)):
        tokens = work.prompt + length
        for i, total in enumerate(sums):
            if total + tokens <= most:
                sums[i] += tokens
                break
        else:
            sums.append(tokens)
    return len(sums), sum(sums) / len(sums)
