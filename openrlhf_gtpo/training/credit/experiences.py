"""From a rollout's rows to training data: micro-batches, the models' forward passes, advantages.

Here rows become upstream's ``Experience``, which its critic, its estimators and its replay buffers take.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from openrlhf_gtpo.report import names
from openrlhf_gtpo.shared_prompts.balance import Prompt, cut_evenly
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit import advantages
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy, entropy_credit
from openrlhf_gtpo.training.credit.old_policy import trains_on_old_log_probs
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rows import Row


class Models(NamedTuple):
    """The run's groups of Ray actors; None for those that it does not have."""

    actor: Any
    critic: Any
    reward: Any
    reference: Any


class ExperienceMaker:
    """Turns rows into experiences with advantages.

    Args:
        strategy: upstream's, with the run's arguments.
        models: asked for log-probs, entropies, values and rewards.
        kl_control: upstream's controller of the KL coefficient.
        features: may replace the old policy's values, and see every batch.

    Attributes:
        credit: the estimator, with its settings; None for one of upstream's.
        outcome: (B,) rewards of the last rollout's own rows, before any length penalty.
        metrics: of the last rollout's own rows (see ``RolloutBatch.metrics``).
        seconds: time of the last rollout's forward passes and of its shaping, by the names of their metrics.
    """

    def __init__(
        self,
        strategy: Any,
        models: Models,
        kl_control: Any,
        tokenizer: Any,
        features: Sequence[ControllerFeature] = (),
    ) -> None:
        self.args: Arguments = strategy.arguments
        self.models, self._kl_control, self._features = models, kl_control, features
        self._pad_token_id = tokenizer.pad_token_id
        self._upstream = RemoteExperienceMaker(None, None, None, None, kl_control, strategy, tokenizer)
        self.credit = entropy_credit(self.args)
        self.outcome = torch.empty(0)
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    @torch.no_grad()
    def make(self, rows: Sequence[Row], own: bool = True) -> list[Experience]:
        """Turn ``rows``, each group's next to each other, into experiences with advantages.

        Args:
            own: True for the step's own rows, which its metrics cover; False for other rows that join it.

        Raises:
            TrainingStopped: a reward, log-prob or entropy is not finite, or too many tokens have no value.
        """
        started = time.perf_counter()
        if self.args.train.shares_prompts:
            share_routes(rows)
        batches = self.split(rows)
        values = self._run_models(batches, rows, own)
        forwarded = time.perf_counter()
        batch = RolloutBatch.gather(batches, values, rows, self.args.rollout.n_samples_per_prompt)
        if self.credit is None:
            advantages.shape_as_upstream(self._upstream, batch, batches)
        else:
            batch.check_finite()
            for feature in self._features if own else ():
                feature.on_values(batch)
            advantages.shape(self.credit, batch, batches, self.args, self._kl_control.value)
        batch.note_outcomes(batches, self.args.actor.policy_loss_type, self.credit)
        for experience in batches:
            weights = torch.tensor([rows[row].weight for row in experience.index])
            if (weights != 1).any():
                experience.advantages = experience.advantages * weights.unsqueeze(-1)
        seconds = {names.OLD_LOG_PROBS: forwarded - started, names.ADVANTAGES: time.perf_counter() - forwarded}
        before = {} if own else self.seconds
        self.seconds = {names.timing(phase): s + before.get(names.timing(phase), 0.0) for phase, s in seconds.items()}
        if own:
            self.outcome, self.metrics = batch.outcome, batch.metrics(batches, self.credit)
            for feature in self._features:
                feature.on_batch(batch, batches)
        return batches

    def split(self, rows: Sequence[Row]) -> list[Experience]:
        """Split rows into micro-batches for the forward passes, equally many for each replica of the policy: under
        ZeRO-3 and expert parallelism, a replica with fewer would block the others. Fewer rows than replicas go one by
        one (see ``dispatch``). A micro-batch of one row may get a second if the rows are not a multiple of replicas.
        With shared prompts, a micro-batch has as many tokens as ``--rollout.micro_batch_size`` rows, padded to the
        longest."""
        samples = [row.experience(self.args.data.max_len) for row in rows]
        for number, sample in enumerate(samples):
            sample.index = [number]
        processes = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        replicas = processes // self._duplicates
        if self.args.train.shares_prompts and len(rows) >= replicas:
            lengths = [len(row.tokens) for row in rows]
            prompts = [_prompt_of(row) for row in rows]
            most = self.args.rollout.micro_batch_size * max(lengths)
            if self.args.train.dynamic_batch_enable:
                most = self.args.rollout.max_tokens_per_gpu or self.args.train.max_tokens_per_gpu
            parts = cut_evenly(lengths, prompts, most, replicas)
            return [self._concatenated(samples[part.start : part.stop]) for part in parts]
        if self.args.train.dynamic_batch_enable and len(rows) >= replicas:
            return self._upstream.split_rollout_samples(samples)  # already deals evenly
        needed = -(-len(rows) // self.args.rollout.micro_batch_size)
        per_replica = min(-(-needed // replicas), max(1, len(rows) // replicas))
        indices = np.array_split(np.arange(len(rows)), min(len(rows), per_replica * replicas))
        return [self._concatenated([samples[row] for row in part]) for part in indices]

    def _concatenated(self, samples: list[Experience]) -> Experience:
        return Experience.concat_experiences(samples, self._pad_token_id)

    @property
    def _duplicates(self) -> int:
        """The number of ranks that return the same results of a forward pass."""
        return self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size

    def _run_models(self, batches: list[Experience], rows: Sequence[Row], own: bool) -> list[TokenValues] | None:
        """Run the models over ``batches`` and fill in their results; returns the old policy's values, (b, t) for each,
        or None if the run does not capture entropies.

        As in upstream's ``make_experience`` (openrlhf 0.11.2, trainer/ppo_utils/experience_maker.py). Groups on
        different GPUs work at the same time.
        """
        # The inputs of each forward pass.
        args, models = self.args, self.models
        columns = {
            name: [getattr(b, name) for b in batches] for name in ("sequences", "action_mask", "attention_mask")
        }
        with_images = dict(columns)
        if any(batch.mm_train_inputs for batch in batches):
            with_images["mm_train_inputs_list"] = [batch.mm_train_inputs for batch in batches]
        # Send to the reward model, the critic and the reference; models on the same GPUs wait for each other.
        rewards = reference = critic = None
        if batches[0].rewards is None:
            assert models.reward is not None, "no reward came with the responses, and there is no reward model"
            without_mask = {name: columns[name] for name in ("sequences", "attention_mask")}
            padded = {"pad_sequence": [True] * len(batches)}
            rewards = self._send(models.reward, args.train.colocate_all, **without_mask, **padded)

        def ask_critic() -> None:
            nonlocal critic
            if models.critic is None or critic is not None:
                return
            if args.train.colocate_critic_reward and rewards is not None:
                ray.get(rewards)
                ray.get(models.reward.async_run_method(method_name="empty_cache"))
            critic = self._send(models.critic, args.train.colocate_all or args.train.colocate_critic_reward, **columns)

        if args.train.colocate_all or not args.train.colocate_critic_reward:
            ask_critic()  # otherwise it waits for the reward model while the policy works
        shared = args.train.colocate_all or args.train.colocate_actor_ref
        if models.reference is not None:  # on Megatron it takes no images, and routes tokens itself
            inputs = columns if args.actor.backend == "megatron" else with_images
            reference = self._send(models.reference, shared, **inputs)

        # The old policy's values: from the actors, unless a feature has others.
        own_values: list[Any] = []  # the actors' values, if they compute them

        def ask_actors(part: Sequence[Experience]) -> list[Any]:
            forward_columns = with_images
            if part is not batches:
                forward_columns = {name: [getattr(batch, name) for batch in part] for name in columns}
            refs = self._send(models.actor, shared, **forward_columns)
            ask_critic()
            results = self._results(refs)
            if part is batches:
                own_values[:] = results
            return results

        values: list[Any]
        if captures_entropy(args):
            policy: Callable[[Sequence[Experience]], list[Any]] = ask_actors
            for feature in self._features:
                policy = partial(feature.policy_values, rows=rows, own=own, split=self.split, forward=policy)
            values = policy(batches)
            # Optimizer steps and the KL compare with the actors' log-probs, even if a feature replaces them.
            log_probs = [value.log_probs for value in own_values or values]
        else:
            values = log_probs = ask_actors(batches)
        ask_critic()

        # Collect, and fill in: rewards, KL to the reference, values, and old log-probs where training reads them.
        nothing = [None] * len(batches)
        base = nothing if reference is None else self._results(reference)
        estimates = nothing if critic is None else self._results(critic)
        for batch, reward in zip(batches, [] if rewards is None else self._results(rewards)):
            batch.rewards = batch.info["reward"] = reward
        keeps_old = trains_on_old_log_probs(args, len(rows))
        for batch, old, ref, value in zip(batches, log_probs, base, estimates, strict=True):
            kl = difference = torch.zeros_like(old)
            if ref is not None and not args.algo.kl.use_loss:
                kl = compute_approx_kl(old, ref, kl_estimator=args.algo.kl.estimator)
                difference = old.float() - ref.float()
            acts = batch.action_mask.any(dim=-1)
            for name, tokens in (("kl", kl), ("logprobs_diff", difference)):
                # Upstream's mean over no tokens is NaN.
                batch.info[name] = masked_mean(tokens, batch.action_mask, dim=-1).where(acts, 0)
            batch.kl, batch.values = kl, value
            batch.base_action_log_probs = ref if args.algo.kl.use_loss else None
            batch.action_log_probs = old if keeps_old else None
        return values if captures_entropy(args) else None

    def _send(self, group: Any, shared: bool, **columns: Any) -> Any:
        """Dispatch a forward pass; on ``shared`` GPUs, wait for it and free its cache."""
        refs = group.async_run_method_batch(method_name="forward", **columns)
        if shared:
            ray.get(refs)
            ray.get(group.async_run_method(method_name="empty_cache"))
        return refs

    def _results(self, refs: Any) -> list[Any]:
        """Collect a forward pass's results, one for each micro-batch."""
        return list(chain.from_iterable(ray.get(refs)[:: self._duplicates]))


def share_routes(rows: Sequence[Row]) -> None:
    """Copy the first row's routes of a prompt to its other rows. Engines compute a prompt for each response, and
    rounding may send a token elsewhere; nothing after such a token could be shared."""
    first: dict[Prompt, Row] = {}
    for row in rows:
        if row.routes is None:
            continue
        prompt = _prompt_of(row)
        given = first.setdefault(prompt, row)
        if given is not row and given.routes is not None:
            row.routes = np.concatenate([given.routes[: prompt.length], row.routes[prompt.length :]])


def _prompt_of(row: Row) -> Prompt:
    return Prompt.of(torch.from_numpy(row.tokens), torch.from_numpy(row.mask))
