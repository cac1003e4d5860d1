"""Compares the DeepSpeed actor and the Megatron actor on the same ragged batches.

Each is a real Ray actor of one process. Token counts include prompts, but never padding.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils import get_strategy
from openrlhf.utils.utils import get_tokenizer
from torch import Tensor
from transformers import AutoConfig

from benchmarks.suite.harness import Measured, measure, print_table, ratios, spread
from benchmarks.suite.results import write_results
from benchmarks.suite.synthetic import long_tailed_lengths
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import patch
from openrlhf_gtpo.training import run as trainer
from openrlhf_gtpo.training.actors.policy_actor import EntropyPolicyActor
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, Models
from openrlhf_gtpo.training.host import start_ray
from openrlhf_gtpo.training.rows import Row

_PHASES = ("forward", "train")


def run(args: argparse.Namespace) -> None:
    """Measure both actors, and print and write the results."""
    if args.rows % 2:
        raise UsageError(f"Expected an even number of --rows, two responses to each prompt, got {args.rows}.")
    from openrlhf_gtpo.training.actors.megatron_actor import MegatronPolicy  # ``overhead`` needs no Megatron

    step = argparse.Namespace(**vars(args), prompts=args.rows // 2, samples=2, warmup=1)
    backends = {"deepspeed": ray.remote(EntropyPolicyActor), "megatron": ray.remote(MegatronPolicy)}
    measured = measure_actors(step, backends, args.trainer_flags)
    rows = []
    for backend, side in measured.items():
        speeds = (statistics.median(ratios(side.about["tokens"], side.seconds[phase])) for phase in _PHASES)
        rows.append((backend, *(f"{speed:,.0f}" for speed in speeds), f"{side.about['peak_bytes'] / 2**30:.2f}"))
    faster = {phase: spread(measured["deepspeed"].over(measured["megatron"], phase)) for phase in _PHASES}
    notes = (
        f"{phase}: megatron is {median:.2f}x as fast as deepspeed (from {low:.2f} to {high:.2f}, batch by batch)"
        for phase, (low, median, high) in faster.items()
    )
    columns = ("backend", "forward tok/s", "train tok/s", "peak GiB")
    print_table(f"medians of {args.repeat} batches", columns, rows, notes)
    sides = {name: {**side.seconds, **side.about} for name, side in measured.items()}
    write_results(args.output, args, {"measured": sides, "ratios": faster})


def measure_actors(
    args: argparse.Namespace, backends: Mapping[str, Any], trainer_flags: Sequence[str] = ()
) -> dict[str, Measured]:
    """Time ``forward`` and ``train``, in seconds, and record ``tokens`` (each repetition's tokens without padding),
    ``loaded_bytes`` and ``peak_bytes`` (memory of the process after loading, and at its peak).

    Args:
        args: the sizes of a step, and ``repeat``, ``warmup`` and ``seed``.
        backends: name to Ray actor.
        trainer_flags: further flags of the trainer.
    """
    argv = trainer_argv(args, {"--train.max_tokens_per_gpu": args.max_tokens})
    argv += ["--algo.advantage.estimator", "gtpo", *trainer_flags]
    rows = args.prompts * args.samples
    tokens: list[int] = []
    parsed = trainer.parse(argv)
    patch.apply(parsed)  # for its DeepSpeed strategy, which leaves the loss undivided
    start_ray(parsed, gpus=len(backends))
    try:
        policies = {name: Policy([*argv, "--actor.backend", name], actor) for name, actor in backends.items()}
        loaded = {name: policy.peak_bytes() for name, policy in policies.items()}

        def new_round(repetition: int) -> None:
            lengths = long_tailed_lengths(rows, args.response_tokens, args.seed + repetition)
            tokens.append(int(lengths.sum()) + rows * args.prompt_tokens)
            for policy in policies.values():
                policy.rows = rollout(policy.args, args.prompt_tokens, lengths, args.seed + repetition)

        phases = {
            name: {"forward": policy.forward, "between": policy.make_experience, "train": policy.fit}
            for name, policy in policies.items()
        }
        measured = measure(phases, args.repeat, args.warmup, new_round=new_round)
        for name, side in measured.items():
            del side.seconds["between"]  # another forward pass, because training needs its results
            peak = max(loaded[name], policies[name].peak_bytes())
            side.about = {"tokens": tokens[args.warmup :], "loaded_bytes": loaded[name], "peak_bytes": peak}
        return measured
    finally:
        ray.shutdown()


def trainer_argv(args: argparse.Namespace, further: Mapping[str, Any]) -> list[str]:
    """Flags for training ``args.model`` in steps of ``args.prompts`` x ``args.samples`` rows."""
    flags = {
        "--actor.model_name_or_path": args.model,
        "--actor.num_gpus_per_node": 1,
        "--rollout.batch_size": args.prompts,
        "--rollout.n_samples_per_prompt": args.samples,
        "--rollout.micro_batch_size": args.micro_batch_size,
        "--train.batch_size": args.prompts * args.samples,
        "--train.micro_batch_size": args.micro_batch_size,
        "--data.max_len": args.prompt_tokens + args.response_tokens,
        "--algo.kl.init_coef": 0,
        "--reward.remote_url": "none",
        "--vllm.num_engines": 1,  # counted, but not started
        **further,
    }
    return [str(word) for pair in flags.items() for word in pair]


class Policy:
    """A policy: a group of one Ray actor, its experience maker, and its rows."""

    rows: list[Row]

    def __init__(self, argv: Sequence[str], actor: Any) -> None:
        self.args = trainer.parse(argv)
        self._strategy = get_strategy(self.args)
        model = self.args.actor.model_name_or_path
        self._group = RayActorGroup(1, 1, actor, pg=None, num_gpus_per_actor=1)
        ray.get(self._group.async_init_model_from_pretrained(self._strategy, model, 1000, None))
        self._tokenizer = get_tokenizer(model, None, "left", self._strategy)
        models = Models(self._group, critic=None, reward=None, reference=None)
        self._maker = ExperienceMaker(self._strategy, models, FixedKLController(0.0), self._tokenizer)

    def forward(self) -> None:
        parts = self._maker.split(self.rows)
        names = ("sequences", "action_mask", "attention_mask")
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        ray.get(self._group.async_run_method_batch(method_name="forward", **columns))

    def experience(self) -> None:
        self._made = self._maker.make(self.rows)

    def append(self) -> None:
        ray.get(self._group.async_run_method_batch(method_name="append", experience=self._made))

    def make_experience(self) -> None:
        self.experience()
        self.append()

    def fit(self) -> None:
        ray.get(self._group.async_run_method(method_name="fit", kl_ctl=0.0))

    def peak_bytes(self) -> int:
        """Peak memory of its process since the last call, in bytes: on its GPU, or resident in total on a CPU host."""
        (peaks,) = ray.get(self._group.async_run_method(method_name="take_peak_memory", until_now="between"))
        return max(peaks.values(), default=0)


def rollout(args: Any, prompt_tokens: int, lengths: Tensor, seed: int) -> list[Row]:
    """Make rows of random tokens, half of every group successful. Only the lengths matter."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = AutoConfig.from_pretrained(args.actor.model_name_or_path).vocab_size
    rows = []
    for number, length in enumerate(lengths.tolist()):
        total, reward = prompt_tokens + length, float(number % 2)
        rows.append(
            Row(
                prompt="",
                label="",
                number=number // args.rollout.n_samples_per_prompt,
                tokens=torch.randint(0, vocabulary, (total,), generator=generator).numpy(),
                mask=np.arange(total) >= prompt_tokens,
                log_probs=None,
                reward=reward,
                score=reward,
            )
        )
    return rows
