"""Upstream's experience maker, with entropies carried from the old-policy forward or the sampler to advantages."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils import experience_maker
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties, apply_stop_properly_penalty
from openrlhf.utils.utils import zero_pad_sequences

from openrlhf_gtpo.algorithms import SURROGATES, length_penalty
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit import old_policy
from openrlhf_gtpo.training.credit.audit import Audit
from openrlhf_gtpo.training.credit.entropy_credit import COMPARE_WITHIN_GROUPS, captures_entropy, entropy_credit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch, in_sampling_order


class EntropyExperienceMaker(RemoteExperienceMaker):
    """Shapes rewards with an estimator of ``algorithms`` if one is selected, with upstream's otherwise.

    Attributes:
        metrics: the last batch's, flat names to numbers (see ``RolloutBatch.metrics``).
        outcome: the last batch's rewards before any length penalty, (B,) in sampling order.
        seconds: time of the last batch's forward passes and of its shaping, by the names of their metrics.
        rescued: rows of rescued groups, which join the next batch but not its ``metrics`` or its dump.
        on_batch: called with each batch and the experiences made from it, if the controller sets it.
    """

    on_batch: Callable[[RolloutBatch, list[Experience]], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.credit = entropy_credit(self.args)
        self.metrics: dict[str, float] = {}
        self.outcome = torch.empty(0)
        self.seconds: dict[str, float] = {}
        self.audit = Audit(self.args)
        self.rescued: list[Experience] = []
        self._policy_values: list[TokenValues] | None = None
        self._in_its_place: list[TokenValues] | None = None  # of the policy's forward, which is skipped
        self._missing: dict[str, float] = {}

    def split_rollout_samples(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Like upstream's, with the same number of micro-batches for every replica of the policy: under ZeRO-3 and
        expert parallelism, one with fewer would leave the others waiting. Fewer rows than replicas go one by one (see
        ``dispatch``), and a micro-batch of one row may get a second if the rows are not a multiple of the replicas.
        The rows' ``sampler_values`` (1, t), which upstream's fields have no place for, become the micro-batches'.
        """
        batches = self._split(rollout_samples)
        if self.args.rollout.entropy == "sampler":
            for batch in batches:
                rows = [rollout_samples[row].sampler_values for row in batch.index]
                batch.sampler_values = TokenValues(*(zero_pad_sequences(list(v), "right") for v in zip(*rows)))
        return batches

    def _split(self, rollout_samples: list[Experience]) -> list[Experience]:
        layout = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        replicas = layout // (self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size)
        if self.args.train.dynamic_batch_enable and len(rollout_samples) >= replicas:
            return super().split_rollout_samples(rollout_samples)  # already deals evenly
        for row, sample in enumerate(rollout_samples):
            sample.index = [row]
        needed = -(-len(rollout_samples) // self.args.rollout.micro_batch_size)
        each = min(-(-needed // replicas), max(1, len(rollout_samples) // replicas))
        count = min(len(rollout_samples), each * replicas)
        parts = np.array_split(np.arange(len(rollout_samples)), count)
        return [
            Experience.concat_experiences([rollout_samples[row] for row in part], self.tokenizer.pad_token_id)
            for part in parts
        ]

    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Like upstream's, followed by the experiences of ``rescued``, whose advantages are weighted."""
        rows, self.rescued = self.rescued, []
        rescued, seconds = (self._make_rescued(rows), self.seconds) if rows else ([], {})
        experiences = super().make_experience_batch(rollout_samples) + rescued
        self.seconds = {name: taken + seconds.get(name, 0.0) for name, taken in self.seconds.items()}
        return experiences

    def _make_rescued(self, rows: list[Experience]) -> list[Experience]:
        # These rows are in no dump, and the policy's sampler has no values for them that could be audited.
        ordinary = self.on_batch, self.audit
        self.on_batch, self.audit = None, self.audit.suspended()
        try:
            experiences = super().make_experience_batch(rows)
        finally:
            self.on_batch, self.audit = ordinary
        for experience in experiences:
            experience.advantages = experience.advantages * self.args.algo.guide.rescue_weight
            experience.labels = [None] * len(experience.labels)  # or they would pass for a dump's row numbers
        return experiences

    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Like upstream's; each experience carries the old policy's :class:`TokenValues` as ``token_values`` (in an
        audit also the exact ones, as ``exact_values``) until the advantages are made from them.

        With the sampler's values, the policy's forward and ``action_log_probs`` are left out if nothing needs them.

        Raises:
            TrainingStopped: too many tokens have no value from the sampler.
        """
        started = time.perf_counter()
        due = self.audit.due()
        exact = self.audit.without_fp8(due, self.actor_model_group, lambda: self._policy_forward(samples_list))
        sampled, rows = _take(samples_list, "sampler_values"), sum(len(s.sequences) for s in samples_list)
        self._in_its_place = None
        if sampled is not None:
            missing = old_policy.count_missing(samples_list, sampled)
            self._missing = {names.SAMPLER_MISSING: float(missing)}
            if not (missing or due or self.audit.closed or old_policy.always_forwards(self.args, rows)):
                self._in_its_place = self._with_guide_rows(samples_list, sampled)
        experiences = super().make_experience(samples_list)
        for experience in experiences:
            for name in ("kl", "logprobs_diff"):  # upstream's mean over no tokens is NaN
                experience.info[name] = experience.info[name].where(experience.action_mask.any(dim=-1), 0)
        values, self._policy_values = self._policy_values, None
        if sampled is not None:
            assert values is not None, "the policy returned no entropies"
            exact = values if due else None
            if due or not self.audit.closed:
                values = [old_policy.fill_missing(ours, theirs) for ours, theirs in zip(sampled, values, strict=True)]
        elif exact is not None and not due:
            assert values is not None
            values, exact = [self.audit.in_use(*both) for both in zip(values, exact, strict=True)], None
        if not old_policy.trains_on_old_log_probs(self.args, rows):
            for experience in experiences:
                experience.action_log_probs = None
        for name, results in (("token_values", values), ("exact_values", exact)):
            if results is not None:
                for experience, result in zip(experiences, results, strict=True):
                    setattr(experience, name, result)
        self.seconds = {names.timing(names.OLD_LOG_PROBS): time.perf_counter() - started}
        return experiences

    def _policy_forward(self, samples_list: list[Experience]) -> list[TokenValues]:
        """Run only the policy's forward; its values are (b, t) for each micro-batch."""
        columns = ("sequences", "action_mask", "attention_mask")
        refs = self._dispatch_forward(
            self.actor_model_group,
            self.args.train.colocate_all or self.args.train.colocate_actor_ref,
            **{name: [getattr(s, name) for s in samples_list] for name in columns},
        )
        return super()._flatten_results(refs, self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size)

    def _with_guide_rows(self, samples_list: list[Experience], sampled: list[TokenValues]) -> list[TokenValues]:
        """``sampled``, (b, t) for each micro-batch, with the old policy's values filled in for rows without any by a
        forward over those rows alone: the guide's, unless they come from a dump."""
        places: list[tuple[int, int]] = []
        alone: list[Experience] = []
        for number, batch in enumerate(samples_list):
            for row in sampled[number].entropy.isnan().any(dim=-1).nonzero().flatten().tolist():
                places.append((number, row))
                columns = ("sequences", "attention_mask", "action_mask", "total_length")
                alone.append(Experience(**{name: getattr(batch, name)[row : row + 1] for name in columns}))
        if not alone:
            return sampled
        filled = [TokenValues(*(values.clone() for values in one)) for one in sampled]
        parts = self._split(alone)
        for part, values in zip(parts, self._policy_forward(parts), strict=True):
            for i, index in enumerate(part.index):
                number, row = places[index]
                for ours, theirs in zip(filled[number], values):
                    width = min(ours.shape[1], theirs.shape[1])  # the two are padded with different micro-batches
                    ours[row] = 0
                    ours[row, :width] = theirs[i, :width]
        return filled

    def _dispatch_forward(self, group: Any, sync_condition: bool, **columns: Any) -> Any:
        if group is self.actor_model_group and self._in_its_place is not None:
            return self._in_its_place
        return super()._dispatch_forward(group, sync_condition, **columns)

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        # Upstream's make_experience uses the policy's results as log-probs before anything can be attached to an
        # experience, and returns nothing else: the values stay on self until make_experience continues (0.11.2,
        # https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/trainer/ppo_utils/experience_maker.py).
        done = self._in_its_place is None or refs is not self._in_its_place
        results: list[Any] = super()._flatten_results(refs, duplicate_factor) if done else refs
        if results and isinstance(results[0], TokenValues):
            self._policy_values = results
            return [result.log_probs for result in results]
        return results

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Like upstream's, and keeps its duties besides advantages: penalties, returns, ``info`` and freeing ``kl``.

        Raises:
            TrainingStopped: GTPO or GRPO-S would shape a reward, log-prob or entropy that is not finite.
        """
        started = time.perf_counter()
        values, exact = _take(experiences, "token_values"), _take(experiences, "exact_values")
        assert values is not None or not captures_entropy(self.args), "the policy returned no entropies"
        batch = RolloutBatch.gather(experiences, values, self.args.rollout.n_samples_per_prompt)
        audit = {}
        if self.credit is None:
            experiences = self._by_upstream(batch, experiences)
        else:
            batch.check_finite()
            if exact is not None:
                assert batch.values is not None
                exact_rows = batch.in_rows(exact)
                audit = self.audit.compare(batch, exact_rows, self.credit)
                if self.audit.closed:
                    batch.values = self.audit.in_use(batch.values, exact_rows)
            self._shape(batch, experiences)
        kind = SURROGATES.get(self.args.actor.policy_loss_type)
        if kind is not None and "correct" in kind.reads:
            correct = batch.succeeded(self.credit).float().view(-1, self.args.rollout.n_samples_per_prompt)
            accuracy = correct.mean(dim=-1, keepdim=True).expand_as(correct)
            for name, rows in ((names.GROUPS_CORRECT, correct), (names.GROUPS_ACCURACY, accuracy)):
                for experience, part in zip(experiences, batch.split(rows.flatten(), experiences), strict=True):
                    experience.info[name] = part
        self.outcome = batch.outcome
        self.metrics = batch.metrics(experiences, self.credit) | audit | self._missing
        self.seconds[names.timing(names.ADVANTAGES)] = time.perf_counter() - started
        if self.on_batch:
            self.on_batch(batch, experiences)
        return experiences

    def _by_upstream(self, batch: RolloutBatch, experiences: list[Experience]) -> list[Experience]:
        """Upstream's estimators, which give 0 where nothing differs.

        Upstream rounds the mean of equal float32 rewards, and divides what is left by a std of the same size (openrlhf
        0.11.2, trainer/ppo_utils/experience_maker.py, compute_advantages_and_returns: eight rewards of 0.2 get -10,
        after its clip). Rewards that are equal within their group, which only differences from the group matter to,
        are therefore 0 while advantages are made from them; other groups keep upstream's numbers.
        """
        estimator = self.args.algo.advantage.estimator
        rewards: list[torch.Tensor] = []

        def penalize(experiences: list[Experience], args: Any) -> None:
            apply_length_penalties(experiences, args)
            rewards.extend(experience.rewards for experience in experiences)
            if estimator in COMPARE_WITHIN_GROUPS:
                equal = _equal_in_group(in_sampling_order(torch.cat(rewards), batch.order), batch)
                for experience, zero in zip(experiences, batch.split(equal, experiences), strict=True):
                    experience.rewards = experience.rewards.masked_fill(zero, 0)

        experience_maker.apply_length_penalties = penalize
        try:
            experiences = super().compute_advantages_and_returns(experiences)
        finally:
            experience_maker.apply_length_penalties = apply_length_penalties
        for experience, reward in zip(experiences, rewards, strict=True):
            experience.rewards = reward
        if estimator in ("gae", "reinforce", "flash_reinforce"):  # less the batch's mean, equal ones are equal still
            tokens = torch.cat([e.advantages[e.action_mask.bool()] for e in experiences])
            if (tokens == tokens[:1]).all():
                for experience in experiences:
                    experience.advantages.zero_()
        return experiences

    def _shape(self, batch: RolloutBatch, experiences: list[Experience]) -> None:
        assert self.credit is not None and batch.values is not None
        penalty = self._length_penalty(batch, experiences)
        entropy = batch.values.entropy
        advantages = self.credit.advantages(entropy, batch.mask, batch.outcome, batch.group_ids, penalty)
        if self.args.reward.clip_range:
            advantages = advantages.clamp(*self.args.reward.clip_range)
        rewards = (batch.outcome if penalty is None else batch.outcome + penalty).float()
        deviation = rewards.view(-1, self.args.rollout.n_samples_per_prompt).std(dim=-1)
        deviation = deviation.repeat_interleave(self.args.rollout.n_samples_per_prompt)
        deviation = deviation.masked_fill(_equal_in_group(rewards, batch), 0)

        shaped = batch.scatter(advantages, experiences)
        for experience, values, std in zip(experiences, shaped, batch.split(deviation, experiences), strict=True):
            values = values + self._kl_return(experience)
            experience.advantages = values * experience.action_mask
            experience.returns = experience.advantages.clone()
            experience.info["group_reward_std"] = std
            tokens = experience.action_mask.sum(dim=-1).clamp_min(1)
            experience.info["return"] = experience.advantages.sum(dim=-1) / tokens
            experience.kl = None

    def _length_penalty(self, batch: RolloutBatch, experiences: list[Experience]) -> torch.Tensor | None:
        """(B,) sum that length penalties add to the outcomes, in sampling order (§4.5.1); logged rewards include it.
        float64: rows penalized down to the same reward must be equal again once it is added to their outcomes.

        The overlong penalty counts action tokens, while upstream's counts the span from the first to the last one
        (openrlhf 0.11.2, trainer/ppo_utils/samples_generator.py, _process_response_into_experience).
        """
        reward = self.args.reward
        if reward.overlong_buffer_len is None and reward.stop_properly_penalty_coef is None:
            return None
        rewards = batch.outcome.to(torch.float32, copy=True)
        if reward.overlong_buffer_len is not None:
            hard = self.args.rollout.max_new_tokens or self.args.data.max_len
            soft = hard - reward.overlong_buffer_len
            lengths = batch.mask.sum(dim=-1)
            rewards += reward.overlong_penalty_factor * length_penalty(lengths, soft, hard, reward.overlong_form)
        for experience, penalized in zip(experiences, batch.split(rewards, experiences), strict=True):
            experience.rewards = penalized.clone()
        if reward.stop_properly_penalty_coef is not None:
            apply_stop_properly_penalty(experiences, reward.stop_properly_penalty_coef)
        for experience in experiences:
            experience.info["reward"] = experience.rewards.clone()
        penalized = in_sampling_order(torch.cat([e.rewards for e in experiences]), batch.order)
        return penalized.double() - batch.outcome.double()

    def _kl_return(self, experience: Experience) -> torch.Tensor:
        """(b, t) return of upstream's KL reward: its sum from each token on, or over the whole response if the
        estimator gives one advantage per sequence. Zero if KL is a loss or off."""
        kl_reward = -max(self.kl_ctl.value, 0.0) * experience.kl.float() * experience.action_mask
        from_here = kl_reward.flip(-1).cumsum(-1).flip(-1)
        if self.credit is not None and self.credit.estimator.level == "sequence":
            return from_here[:, :1].expand_as(from_here)
        return from_here


def _equal_in_group(rewards: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """(B,) bool, True where all ``rewards`` (B,) of a row's group, in sampling order, are the same number."""
    groups = rewards.view(int(batch.group_ids.max()) + 1, -1)
    return (groups == groups[:, :1]).all(dim=-1).repeat_interleave(groups.shape[1])


def _take(experiences: list[Experience], name: str) -> list[TokenValues] | None:
    """Remove and return what ``make_experience`` attached to every experience as ``name``; None if nothing."""
    taken = [vars(experience).pop(name, None) for experience in experiences]
    return None if taken[0] is None else taken
