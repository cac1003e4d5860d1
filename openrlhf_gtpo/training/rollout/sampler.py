"""The sampler: draws prompts, asks the engines, and returns rows in the order of their prompts.

Each prompt has a number. Under full determinism the seeds of its responses follow from it. If an engine dies, the
others get its requests. If the filter drops a group, the next prompt's group replaces it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from tqdm import tqdm
from vllm import SamplingParams

from openrlhf_gtpo.algorithms import success
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.rollout.groups import Groups, Parts
from openrlhf_gtpo.training.rows import Dropped, Request, Rollout, Row
from openrlhf_gtpo.training.settings.prompts import template_variables

_TRAINING, _EVALUATION = 0, 1  # streams of seeds
_AGAIN = 1.0  # seconds until engines are told again to wake up or sleep
_LOOK_EVERY = 10.0  # seconds
_MAY_DROP = 0.1  # of a rollout's prompts, and one in any case


class Sampler:
    """Samples rollouts for training, and evaluations.

    Args:
        args: the run's arguments.
        prompts, held_out: loaders of upstream's prompt data set; None for no evaluation.
        tokenizer: Ray's reference to it; to unpickle a copy with 49,152 tokens takes 0.2 s.
        engines: serving rollout actors.
        recover: called with the error of an engine's call. Returns when the engines in the list can be asked again;
            raises the error if no engine's failure caused it.

    Attributes:
        engines: a list that others may change.
        drawn: training prompts drawn since the run began; a resumed run continues from its checkpoint's number.
        of_pass: training prompts drawn in the current pass over the data, likewise.
        with_log_probs: whether training rows carry their engine's log-probs.
    """

    def __init__(
        self,
        args: Arguments,
        prompts: Iterable[Any],
        held_out: Iterable[Any] | None,
        tokenizer: ray.ObjectRef,
        engines: list[Any],
        recover: Callable[[Exception], None],
    ) -> None:
        self.args, self.engines, self._recover = args, engines, recover
        self._prompts, self._held_out, self._tokenizer = prompts, held_out, tokenizer
        self._credit = entropy_credit(args)
        self._left: Iterator[Any] | None = None  # the episode's remaining prompts
        self._load: Counter[int] = Counter()  # outstanding responses of each engine, by id
        self.drawn = self.of_pass = 0
        self.with_log_probs = args.algo.advantage.is_correction_level != "off"

    def sample(self) -> Rollout:
        """Sample the episode's next rollout, or the first of the next episode; without prompts, it is empty.

        Raises:
            TrainingStopped: too many prompts were dropped, responses log different names, or ``recover`` gave up.
        """
        before, seen = self.drawn, Rollout([], 0, False)
        with self.awake():
            groups = self._groups(
                iter(self.draw, None),
                self.per_rollout,
                self.training_params(),
                seen,
                self.args.algo.dynamic_filtering_enable,
            )
        return self.rollout(groups, self.drawn - before, seen)

    @property
    def per_rollout(self) -> int:
        """Number of groups in a rollout."""
        rollout = self.args.rollout
        return min(rollout.batch_size, rollout.vllm_generate_batch_size or rollout.batch_size)

    def draw(self) -> Request | None:
        """Draw the next training prompt; None at the end of the episode, after which the next one begins."""
        if self._left is None:
            self._left = _prompts(iter(self._prompts))
        prompt = next(self._left, None)
        if prompt is None:
            self._left, self.of_pass = None, 0
            return None
        number, self.drawn, self.of_pass = self.drawn, self.drawn + 1, self.of_pass + 1
        return self.request(prompt, number)

    def rollout(self, groups: Mapping[int, list[Row]], prompts: int, seen: Rollout) -> Rollout:
        """Complete ``seen`` with the number of drawn ``prompts`` and the rows of ``groups``.

        Raises:
            TrainingStopped: responses log different names.
        """
        rows = [row for number in sorted(groups) for row in groups[number]]
        for row in rows:
            if differing := row.logs.keys() ^ rows[0].logs.keys():
                raise TrainingStopped(
                    "Expected the same names in every response's extra_logs, which are averaged; only some responses "
                    f"have {', '.join(sorted(differing))}."
                )
        seen.rows, seen.prompts = rows, prompts
        if self.args.algo.dynamic_filtering_enable and prompts:
            seen.passed = len(groups) / prompts * 100
        return seen

    def evaluate(self, temperature: float, samples: int) -> list[Row]:
        """Sample ``samples`` rows for each held-out prompt. Under full determinism every evaluation has the same
        seeds."""
        assert self._held_out is not None
        params = self.params(
            temperature, self.args.rollout.top_p, self.args.algo.advantage.is_correction_level != "off"
        )
        requests = (
            self._request(prompt, number, _EVALUATION, samples)
            for number, prompt in enumerate(_prompts(iter(self._held_out)))
        )
        rows: list[Row] = []
        exhausted = False
        with self.awake():
            while not exhausted:
                seen = Rollout([], 0, False)  # of one batch, of which a tenth may be dropped
                groups = self._groups(requests, self.args.rollout.batch_size, params, seen)
                exhausted = seen.exhausted
                rows += [row for number in sorted(groups) for row in groups[number]]
        return rows

    def ask(self, requests: Sequence[Request], params: SamplingParams) -> dict[ray.ObjectRef, Request]:
        """Send ``requests`` to their engines, or to the engines with least to do."""
        sent = {}
        for request in requests:
            engine = request.engine or min(self.engines, key=lambda engine: self._load[id(engine)])
            ref = engine.sample.remote(
                request._replace(engine=None), params, self.args.data.max_len, [self._tokenizer]
            )
            self._load[id(engine)] += request.samples
            sent[ref] = request._replace(engine=engine)
        return sent

    def note_answer(self, request: Request) -> None:
        """Note that the engine has answered this request, or failed."""
        self._load[id(request.engine)] -= request.samples

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engines awake within this block, if ``--vllm.enable_sleep`` lets them sleep otherwise."""
        if self.args.vllm.enable_sleep:
            self._call("wake_up")
        yield
        if self.args.vllm.enable_sleep:
            self._call("sleep")

    def _call(self, method: str) -> None:
        """Wake the engines or put them to sleep. If one dies, repeat it for the rest; a second call does no harm."""
        while True:
            try:
                batch_vllm_engine_call(self.engines, method)
                return
            except ray.exceptions.RayError as error:
                self._recover(error)
                time.sleep(_AGAIN)

    def training_params(self) -> SamplingParams:
        """Return the sampling parameters of training rows."""
        return self.params(self.args.rollout.temperature, self.args.rollout.top_p, self.with_log_probs)

    def params(self, temperature: float, top_p: float, with_log_probs: bool) -> SamplingParams:
        """Return OpenRLHF's sampling parameters (0.11.2, trainer/ppo_utils/samples_generator.py)."""
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=self.args.rollout.max_new_tokens,  # None: up to --data.max_len
            min_tokens=1,
            skip_special_tokens=False,
            logprobs=1 if with_log_probs else None,
        )

    def request(self, prompt: tuple[Any, ...], number: int) -> Request:
        """Make the request for all responses to a training prompt (text, label, images)."""
        return self._request(prompt, number, _TRAINING, self.args.rollout.n_samples_per_prompt)

    def _request(self, prompt: tuple[Any, ...], number: int, stream: int, samples: int) -> Request:
        text, label, images = prompt
        train = self.args.train
        seed = (train.seed, stream, number) if train.full_determinism_enable else None
        is_trained = stream == _TRAINING
        return Request(
            text, label, images, number, samples, seed=seed, is_trained=is_trained, variables=self.variables_of(text)
        )

    def variables_of(self, prompt: str) -> Mapping[str, Any]:
        """Return the chat template's variables for one of the run's prompts."""
        data_sets = [getattr(loader, "dataset", None) for loader in (self._prompts, self._held_out)]
        for variables in (getattr(data_set, "variables", {}) for data_set in data_sets):
            if prompt in variables:
                return variables[prompt]
        return template_variables(self.args.data.chat_template_kwargs)

    def _groups(
        self,
        requests: Iterator[Request],
        count: int,
        params: SamplingParams,
        seen: Rollout,
        filters: bool = False,
    ) -> Mapping[int, list[Row]]:
        """Sample the groups of the next ``count`` prompts, by number; fewer at the end of ``requests``. ``seen`` notes
        that end, sampled tokens and dropped prompts.
        """
        groups: dict[int, list[Row]] = {}
        asked = Groups(self, params)
        may_drop = self.may_drop(count)

        def draw() -> bool:
            request = next(requests, None)
            if request is None:
                seen.exhausted = True
                return False
            asked.ask(request)
            return True

        drawn = sum(draw() for _ in range(count))
        progress = tqdm(total=drawn, desc="Generate samples")
        while asked:
            for request, parts in asked.complete(asked.answered(_LOOK_EVERY)):
                rows = self.kept(parts, seen, may_drop, filters)
                if rows:
                    groups[request.number] = rows
                    progress.update()
                elif filters:
                    draw()
        return groups

    def kept(self, parts: Parts, seen: Rollout, may_drop: int, filters: bool) -> list[Row]:
        """Return the rows of a complete group; none if a part of it was dropped, or the filter drops it.

        Raises:
            TrainingStopped: more than ``may_drop`` prompts were dropped because their reward or agent failed.
        """
        rows = self._complete(parts, seen, may_drop)
        if rows and filters and self._is_filtered(rows):
            self.on_filtered(rows)
            return []
        return rows

    @staticmethod
    def may_drop(prompts: int) -> int:
        """Return how many of ``prompts`` may be dropped."""
        return max(1, int(_MAY_DROP * prompts))

    def split(self, request: Request) -> Sequence[Request]:
        """Split a training prompt's request among samplers, in the order of the group's rows; here, keep it whole."""
        return [request]

    def in_place_of(self, request: Request, error: Exception) -> Request:
        """Return the request to repeat after a failure; raises ``error`` if no engine's death explains it."""
        self._recover(error)
        return request._replace(engine=None)

    def on_filtered(self, rows: Sequence[Row]) -> None:
        """Called with a group that the filter drops."""

    def _complete(self, group: Parts, seen: Rollout, may_drop: int) -> list[Row]:
        """Return a group's rows in their order; none if a part of it was dropped.

        Raises:
            TrainingStopped: too many prompts of the rollout were dropped.
        """
        rows: list[Row] = []
        for first in sorted(group):
            part = group[first]
            if isinstance(part, Dropped):
                seen.dropped += 1
                if seen.dropped > may_drop:
                    raise TrainingStopped(
                        f"The reward or agent failed for {seen.dropped} prompts of a rollout, more than a tenth of "
                        f"it. The last failure: {part.reason}"
                    )
                print(f"Warning: dropped a prompt. {part.reason}", flush=True)
                return []
            rows += part
        seen.tokens += sum(row.num_actions for row in rows)
        return rows

    def _is_filtered(self, rows: Sequence[Row]) -> bool:
        """True if dynamic sampling replaces the group: its mean score is outside ``--algo.dynamic_filtering_range``,
        or all its responses are equal, in their scores or in what the estimator compares.

        OpenRLHF's filter looks only at the mean score, which is in its range for eight scores of 0.3 too (0.11.2,
        trainer/ppo_utils/samples_generator.py, _generate_vllm)."""
        if any(row.reward is None for row in rows):  # a reward model scores later
            return False
        low, high = self.args.algo.dynamic_filtering_range
        rewards = torch.tensor([row.reward for row in rows])
        scores = torch.tensor([row.reward if row.score is None else row.score for row in rows])
        if not low < sum(scores.tolist()) / len(rows) < high:
            return True
        if self._credit is not None and self._credit.needs_both:
            rewards = success(rewards, self._credit.config.success_threshold)
        return any(bool((values == values[0]).all()) for values in (scores, rewards))


def _prompts(loader: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield (prompt, label, images) of each prompt in upstream's batches."""
    for _, texts, labels, images in loader:
        yield from zip(texts, labels, images, strict=True)
