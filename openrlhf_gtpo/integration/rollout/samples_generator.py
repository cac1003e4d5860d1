"""Upstream's sampling of responses, with rows in the order of their prompts and, under full determinism, a seed each.

Upstream dispatches every prompt in a call of its own and takes responses as they come, so the order of a batch's rows
depends on timing. Here each prompt travels with its number.
"""

from typing import Any, NamedTuple

import numpy as np
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

_TRAINING, _EVALUATION = 0, 1  # streams of seeds


class NumberedLabel(NamedTuple):
    """What a rollout actor gets in the place of a prompt's label, which upstream hands on unread.

    Attributes:
        label: the prompt's own.
        number: of the prompt, in the order of dispatch.
        seed: what the seeds of the prompt's requests are made from; None leaves sampling to the engine's generator.
    """

    label: Any
    number: int
    seed: tuple[int, ...] | None


def request_seed(*key: int) -> int:
    """A seed for one request, well spread over 32 bits however close to each other the keys are."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class OrderedSamplesGenerator(SamplesGenerator):
    """Upstream's, for engines that are ``RolloutActor``.

    Attributes:
        dispatched: prompts of training since the run began; a resumed run sets it to what its checkpoint has consumed.
        held_out: the rows of the last evaluation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dispatched = 0
        self.held_out: list[Experience] = []
        self._evaluated: int | None = None  # prompts of the evaluation that is going on

    @property
    def at_end_of_episode(self) -> bool:
        """Whether the last call of ``generate_samples`` drew the episode's last prompt and found none behind it.

        Rows do not outlive the step that they were sampled for: synchronous training samples no more than one needs.
        """
        if not hasattr(self, "_dataloader_iter"):  # before the first call
            return False
        assert not self._sample_buffer, "rows that wait for the next step are not in a checkpoint"
        return self._dataloader_iter is None

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """As upstream's; the percentage of prompts that pass the filter counts prompts (upstream counts responses,
        so that 8 to a prompt make it 800). Can go with https://github.com/OpenRLHF/OpenRLHF/pull/1282 or its like."""
        samples, passed, consumed, exhausted = super().generate_samples(**generate_kwargs)
        if passed is not None:
            passed /= self.args.rollout.n_samples_per_prompt
        return samples, passed, consumed, exhausted

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """As upstream's; under full determinism every evaluation has the same seeds, and training's do not move."""
        self._evaluated = 0
        try:
            self.held_out = super().generate_eval_samples(**generate_kwargs)
            return self.held_out
        finally:
            self._evaluated = None

    def _generate_vllm(self, *args: Any, **kwargs: Any) -> tuple[list[Experience], int, bool]:
        experiences, consumed, exhausted = super()._generate_vllm(*args, **kwargs)
        experiences.sort(key=lambda experience: experience.index)  # stable: a prompt's responses stay as they are
        return experiences, consumed, exhausted

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[Any], **kwargs: Any) -> list[Any]:
        return super()._dispatch_prompts_to_vllm(prompts, [self._numbered(label) for label in labels], **kwargs)

    def _numbered(self, label: Any) -> NumberedLabel:
        if self._evaluated is None:
            stream, number = _TRAINING, self.dispatched
            self.dispatched += 1
        else:
            stream, number = _EVALUATION, self._evaluated
            self._evaluated += 1
        deterministic = self.args.train.full_determinism_enable
        return NumberedLabel(label, number, (self.args.train.seed, stream, number) if deterministic else None)

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.index = [response["prompt_number"]]  # until the experience maker numbers rows
        return experience
