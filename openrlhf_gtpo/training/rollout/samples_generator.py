"""Upstream's sampling of responses, with rows in prompt order and, under full determinism, a seed for each.

Upstream dispatches every prompt in a call of its own and takes responses as they come, so the order of a batch's rows
depends on timing. Here each prompt travels with its number.

If an engine dies in the middle, upstream's loop starts over with the prompts that it has drawn: responses that have
come or are on their way are not asked for again, and the other prompts go to the engines that are left.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray
import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from openrlhf_gtpo.algorithms import success
from openrlhf_gtpo.errors import TrainingStopped, one_line
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.rollout.guide import DEATHS, GUIDE_DIED, GUIDED, Guide, GuideRows
from openrlhf_gtpo.training.rollout.rescue import RescueQueue, plain
from openrlhf_gtpo.training.rollout.rewards import refuse_taken_names

_TRAINING, _EVALUATION, _RESCUE = 0, 1, 2  # streams of seeds

SAMPLER_VALUES = "sampler_values"  # in a response: see ``sampler_calls.py``
DROPPED = "dropped"  # key for the reason, in place of all responses to a prompt
_AGAIN = 1.0  # seconds until engines are woken, or put to sleep, again
_MAY_DROP = 0.1  # of a rollout's prompts, and one in any case
_FILTERED = SimpleNamespace(scores=[torch.tensor(float("nan"))])  # no range of mean scores has its group in it


class NumberedLabel(NamedTuple):
    """What a rollout actor gets in place of a prompt's label, which upstream passes on unread."""

    label: Any  # the prompt's own
    number: int  # of the prompt, in the order of dispatch
    seed: tuple[int, ...] | None  # from which its requests' seeds are made; None: the engine's generator samples
    is_trained: bool = True  # whether the policy learns from the responses, as it does not in an evaluation
    guide: GuideRows | None = None  # the guide's part of the responses


class SharedTokenizer(NamedTuple):
    """What a rollout actor gets in place of the tokenizer, of which upstream sends a copy with every prompt: pickling
    and unpickling one with 49,152 tokens takes 0.2 s each time (openrlhf 0.11.2, _dispatch_prompts_to_vllm)."""

    ref: ray.ObjectRef


class OrderedSamplesGenerator(SamplesGenerator):
    """Upstream's samples generator, for engines in a ``StrictRolloutActor``.

    Args:
        recover: called with what an engine's call raised; returns when the engines in the list can be asked again, and
            raises the error if no engine's failure caused it.
        guide: None in a run without one.

    Attributes:
        dispatched: training prompts since the run began; a resumed run sets it to what its checkpoint has consumed.
        dropped: prompts of the last rollout whose reward or agent failed.
        tokens: number sampled by the last call of ``generate_samples``, whatever became of them.
        held_out: the rows of the last evaluation.
        rescue: prompts that wait for the guide, with ``--algo.guide.rescue_batch``.
        rescued: rows of the groups that the guide has rescued, until the controller takes them to train on.
    """

    def __init__(
        self, *args: Any, recover: Callable[[Exception], None], guide: Guide | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._guide = guide
        self._credit = entropy_credit(self.args)
        self._group: list[Experience] = []  # the responses so far to the prompt that upstream is looking at
        self.rescue = RescueQueue(guide.rescue_batch if guide else 0)
        self.rescued: list[Experience] = []
        self._responses: dict[int, list[tuple[dict[str, Any], Experience]]] = {}  # of a rollout, by prompt number
        self.dispatched = 0
        self.dropped = self.tokens = 0
        self.held_out: list[Experience] = []
        self._recover = recover
        self._evaluated: int | None = None  # prompts of the evaluation in progress
        self._asked: dict[int, Any] = {}  # prompts that have been sent, with Ray's reference to their responses
        samples_generator.batch_vllm_engine_call = self._wake_or_sleep  # with which upstream does so before and after

    def _wake_or_sleep(self, engines: list[Any], method: str) -> None:
        """Like upstream's, even if an engine dies: on those that are left, some of which have done it already."""
        while True:
            try:
                batch_vllm_engine_call(engines, method)
                return
            except ray.exceptions.RayError as error:
                self._recover(error)
                time.sleep(_AGAIN)

    @property
    def at_end_of_episode(self) -> bool:
        """True if the last call of ``generate_samples`` drew the episode's last prompt and found none after it.

        Rows do not outlive the step that they were sampled for: synchronous training samples only what a step needs.
        """
        if not hasattr(self, "_dataloader_iter"):  # before the first call
            return False
        assert not self._sample_buffer, "rows that wait for the next step are not in a checkpoint"
        return self._dataloader_iter is None

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """Like upstream's; the percentage of prompts that pass the filter counts prompts (upstream counts responses,
        so that 8 per prompt make it 800). Can go with https://github.com/OpenRLHF/OpenRLHF/pull/1282 or its like."""
        self.dropped = self.tokens = 0
        with self._guide.awake() if self._guide and self._guide.share > 0 else nullcontext():
            samples, passed, consumed, exhausted = super().generate_samples(**generate_kwargs)
            self._rescue(**generate_kwargs)
        if passed is not None:
            passed /= self.args.rollout.n_samples_per_prompt
        return samples, passed, consumed, exhausted

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Like upstream's; under full determinism every evaluation has the same seeds, and training's stay as is."""
        self._evaluated = 0
        try:
            self.held_out = super().generate_eval_samples(**generate_kwargs)
            return self.held_out
        finally:
            self._evaluated = None

    def _generate_vllm(
        self, dataloader_iter: Iterable[Any], num_prompts: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """Like upstream's, but in prompt order, and even if an engine dies.

        Raises:
            TrainingStopped: too many prompts were dropped, responses log different things, or ``recover`` gave up.
        """
        drawn: list[Any] = []
        before = self.dispatched, self._evaluated, self.tokens
        self._may_drop = max(1, int(_MAY_DROP * num_prompts))

        def draw() -> Iterator[Any]:
            for batch in dataloader_iter:
                drawn.append(batch)
                yield batch

        while True:
            (self.dispatched, self._evaluated, self.tokens), self.dropped = before, 0
            self._responses = {}
            try:
                found = super()._generate_vllm(chain(tuple(drawn), draw()), num_prompts, *args, **kwargs)
                break
            except ray.exceptions.RayError as error:
                self._recover(error)
                self._asked = {number: ref for number, ref in self._asked.items() if not _has_failed(ref)}
        self._asked.clear()
        experiences, consumed, exhausted = found
        kept = [experience for experience in experiences if isinstance(experience, Experience)]
        kept.sort(key=lambda experience: experience.index)  # stable: a prompt's responses keep their order
        for experience in kept if self._evaluated is None else ():
            if differing := experience.info.keys() ^ kept[0].info.keys():
                raise TrainingStopped(
                    "Expected the same names in every response's extra_logs, which are averaged; only some have "
                    f"{', '.join(sorted(differing))}."
                )
        accepted = {experience.index[0] for experience in kept}
        for number in sorted(self._responses.keys() - accepted):  # whose groups the filter has dropped
            assert self._guide is not None
            group = self._responses[number]
            if not any(self._guide.is_success(experience) for _, experience in group):
                self.rescue.add([response for response, _ in group if GUIDED not in response])
        self._responses = {}
        return kept, consumed, exhausted

    def _dispatch_prompts_to_vllm(
        self, prompts: list[str], labels: list[Any], *, images: list[Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        numbered = [self._numbered(label) for label in labels]
        images = images or [None] * len(prompts)
        new = [row for row in zip(prompts, numbered, images, strict=True) if row[1].number not in self._asked]
        if new:
            columns = [list(column) for column in zip(*new)]
            refs = super()._dispatch_prompts_to_vllm(*columns[:2], images=columns[2], **kwargs)
            self._asked |= {label.number: ref for (_, label, _), ref in zip(new, refs, strict=True)}
        return [self._asked[label.number] for label in numbered]

    def _numbered(self, label: Any) -> NumberedLabel:
        if self._evaluated is None:
            stream, number = _TRAINING, self.dispatched
            self.dispatched += 1
        else:
            stream, number = _EVALUATION, self._evaluated
            self._evaluated += 1
        deterministic = self.args.train.full_determinism_enable
        seed = (self.args.train.seed, stream, number) if deterministic else None
        is_trained = stream == _TRAINING
        guide = self._guide.rows_of(number) if self._guide and is_trained else None
        return NumberedLabel(label, number, seed, is_trained, guide)

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Any:
        """Like upstream's, with a response's ``sampler_values`` if it has any; for a dropped prompt, and in place of
        the last response to one that :meth:`_is_uniform`, something that no filter lets through.

        Raises:
            TrainingStopped: too many prompts were dropped, an agent returned something that is not a response, or the
                guide died or gave no log-probs.
        """
        if DROPPED in response:
            self.dropped += 1
            if self.dropped > self._may_drop:
                raise TrainingStopped(
                    f"The reward or agent failed for {self.dropped} prompts of a rollout, more than a tenth of it. "
                    f"The last: {response[DROPPED]}"
                )
            print(f"Warning: a prompt is dropped. {response[DROPPED]}", flush=True)
            return _FILTERED
        max_len = generate_kwargs.get("max_len", 2048)
        try:
            # Upstream ends an agent whose context is full, and counts it as cut off only if its last turn was.
            end = max((end for _, end in response["action_ranges"]), default=0)
            if max_len <= len(response["observation_tokens"]) > end:
                response["truncated"] = True
            experience = super()._process_response_into_experience(response, **generate_kwargs)
            for name in ("rewards", "scores"):
                number = getattr(experience, name)
                if number is not None and not number.isfinite().all():  # a filter would drop its group without a word
                    raise ValueError(f"its {name} are not finite")
            log_probs, tokens = response["rollout_log_probs"], response["observation_tokens"]
            if log_probs is not None and len(log_probs) != len(tokens):  # as of an agent that does not ask for them
                raise ValueError(f"it has {len(log_probs)} rollout_log_probs for {len(tokens)} observation_tokens")
            size = response.get("vocab_size", math.inf)  # an agent's response has it
            unknown = [token for token in experience.sequences[0].tolist() if not 0 <= token < size]
            if unknown:
                raise ValueError(f"token {unknown[0]} is not in the model's vocabulary of {size}")
        except Exception as error:  # a reward's answer has been checked, an agent's comes from the user's code
            what = f"{type(error).__name__}: {one_line(error):.200}"
            raise TrainingStopped(
                "Expected --train.agent_func_path to return a response as OpenRLHF's MultiTurnAgentExecutor.execute "
                f"does, with numbers as reward, scores and extra_logs, got one that cannot be read ({what}): "
                f"{response!r:.300}"
            ) from error
        refuse_taken_names(response.get("extra_logs", {}), "--train.agent_func_path")
        if self._evaluated is None:
            self.tokens += int(experience.action_mask.sum())
        experience.index = [response["prompt_number"]]  # until the experience maker numbers rows
        if SAMPLER_VALUES in response:
            shown = slice(1, max_len)  # as upstream cuts rollout_log_probs
            columns = (torch.tensor([values[shown]], dtype=torch.float32) for values in response[SAMPLER_VALUES])
            experience.sampler_values = TokenValues(*columns)
        if self._guide:
            if GUIDE_DIED in response:
                self._guide.died(response[GUIDE_DIED])
            self._mark(experience, is_guided=GUIDED in response)
            if self._guide.rescue_batch and self._evaluated is None:
                self._responses.setdefault(response["prompt_number"], []).append((response, experience))
        has_reward = experience.rewards is not None  # not yet, if a reward model gives it
        if self._evaluated is None and self.args.algo.dynamic_filtering_enable and has_reward:
            if experience.scores is None:  # as of an agent without any; upstream would let every group through
                experience.scores = experience.rewards
            if self._group and self._group[0].index != experience.index:
                self._group = []
            self._group.append(experience)
            if len(self._group) == self.args.rollout.n_samples_per_prompt and self._is_uniform(self._group):
                return _FILTERED
        return experience

    def _is_uniform(self, group: list[Experience]) -> bool:
        """True if the responses to a prompt do not differ in their scores, or in what the estimator compares.

        Upstream's filter sees only their mean score, which lies in its range for eight scores of 0.3 too (openrlhf
        0.11.2, trainer/ppo_utils/samples_generator.py, _generate_vllm).
        """
        scores, rewards = (torch.cat([getattr(one, name) for one in group]) for name in ("scores", "rewards"))
        if self._credit is not None and self._credit.needs_both:
            rewards = success(rewards, self._credit.config.success_threshold)
        return any(bool((values == values[0]).all()) for values in (scores, rewards))

    def _rescue(self, **generate_kwargs: Any) -> None:
        """Have the guide answer prompts at which the policy failed, if a batch of them is waiting; those that it
        answers correctly become groups with rows of both, ``rescued``.

        The ratios of these rows use the log-probs of the engine they came from: the policy may have moved since.
        """
        guide, samples = self._guide, self.args.rollout.n_samples_per_prompt
        if guide is None or not guide.rescue_batch or self.rescued:
            return
        failures = self.rescue.take()
        if not failures:
            return
        labels = []
        for responses in failures:
            number = responses[0]["prompt_number"]
            seed = (self.args.train.seed, _RESCUE, number) if self.args.train.full_determinism_enable else None
            labels.append(NumberedLabel(responses[0]["label"], number, seed))
        # Half of a group; more if some rows that failed were the guide's, so that fewer are the policy's.
        count = max(samples // 2, samples - min(map(len, failures)))
        engines = self.vllm_engines
        self.vllm_engines: Sequence[Any] = guide.engines
        with guide.awake():  # around all of this, so that its living engines sleep again if one dies
            try:
                refs = SamplesGenerator._dispatch_prompts_to_vllm(
                    self,
                    [responses[0]["prompt"] for responses in failures],
                    labels,
                    **generate_kwargs | {"n_samples_per_prompt": count},
                )
                answers = ray.get(refs)
            except DEATHS as death:
                guide.died(f"{type(death).__name__} at a rescue")
                self.rescue.given_up += len(failures)
                return
            finally:
                self.vllm_engines = engines
        for responses, theirs in zip(failures, answers, strict=True):
            rows = []
            if not any(DROPPED in answer for answer in theirs):
                make = super()._process_response_into_experience
                rows = [make(one, **generate_kwargs) for one in [*responses[: samples - count], *map(plain, theirs)]]
                self.tokens += sum(int(row.action_mask.sum()) for row in rows[samples - count :])
            if not any(guide.is_success(row) for row in rows):
                self.rescue.given_up += 1
                continue
            self.rescue.rescued += 1
            for i, row in enumerate(rows):
                self._mark(row, is_guided=i >= samples - count, is_rescued=True)
            self.rescued += rows

    def _mark(self, experience: Experience, is_guided: bool, is_rescued: bool = False) -> None:
        """Say in the row's ``info`` whose it is. A row whose ratio uses its engine's log-probs is not of the current
        policy: if entropies come from the sampler, it has none (NaN)."""
        experience.info[names.GUIDE_ROWS] = torch.tensor([float(is_guided)])
        if self.args.algo.guide.rescue_batch:
            experience.info[names.RESCUE_ROWS] = torch.tensor([float(is_rescued)])
        if self._evaluated is not None:
            return
        of_engine = is_guided or is_rescued
        mask, log_probs = experience.action_mask.bool(), experience.rollout_log_probs
        if log_probs is None or of_engine and not log_probs[mask].isfinite().all():
            raise TrainingStopped(
                "With a guide, expected a finite log-prob from the engine for every token it samples, got a response "
                f"with {'none' if log_probs is None else 'others'}; an agent of --train.agent_func_path has to hand "
                f"on the engine's as rollout_log_probs. Prompt: {experience.prompts[0]!r:.300}"
            )
        if of_engine and self.args.rollout.entropy == "sampler":
            unknown = torch.full(mask.shape, torch.nan).where(mask, 0)
            experience.sampler_values = TokenValues(unknown, unknown.clone())


def _has_failed(ref: Any) -> bool:
    """True if a call has ended without responses; False if it is still on its way."""
    try:
        return bool(ray.wait([ref], timeout=0)[0]) and ray.get(ref) is None
    except ray.exceptions.RayError:
        return True
