"""When a run needs the actor's old-policy forward, and how many optimizer steps it makes.

The old policy's log-probs and entropies come from that forward, or from vLLM's sampler, which has the whole
distribution (``--rollout.entropy sampler``). With one optimizer step per rollout no old log-probs are needed: the
policy in training is still the old one, so the training forward's own log-probs, detached, are the old ones.
"""

from openrlhf_gtpo.training.arguments import Arguments


def count_rows(args: Arguments) -> int:
    """Count the rows of a rollout. Upstream asks the engines once for each rollout, even if that draws fewer prompts
    than a rollout may have (openrlhf 0.11.2, trainer/ppo_utils/samples_generator.py, generate_samples)."""
    prompts = min(args.rollout.batch_size, args.rollout.vllm_generate_batch_size)
    return prompts * args.rollout.n_samples_per_prompt


def count_steps(total: int, batch_size: int) -> int:
    """Count the optimizer steps in an epoch over ``total`` rows: one per whole batch, but at least one. Leftover rows
    are spread over the steps; too few rows for a batch make one small step."""
    return max(1, total // batch_size)


def count_all_steps(args: Arguments, prompts: int) -> int:
    """Count the optimizer steps in a run over ``prompts`` prompts, for the learning-rate schedule. Upstream counts the
    batches in all episodes' rows (openrlhf 0.11.2, trainer/ppo_trainer.py, prepare_datasets), too few or too many if a
    rollout's rows are not a multiple of a batch."""
    rows, batch = count_rows(args), args.train.batch_size
    whole, rest = divmod(prompts * args.rollout.n_samples_per_prompt, rows)
    steps = whole * count_steps(rows, batch) + (count_steps(rest, batch) if rest else 0)
    return steps * args.train.max_epochs * args.train.num_episodes


def trains_on_old_log_probs(args: Arguments, rows: int) -> bool:
    """True if a rollout of ``rows`` rows keeps old log-probs from the actor's forward. They are free if entropies come
    from that forward. Otherwise they are needed if several optimizer steps use them: on these rows, on a feature's
    rows that join them, or on the rollouts of an actor that waits for its critic."""
    if args.rollout.entropy == "actor" or args.rollout.joined_by or args.critic.freezing_steps >= 0:
        return True
    steps = count_steps(rows, args.train.batch_size) * args.train.max_epochs
    return steps > 1 and args.rollout.log_probs == "actor"


def always_forwards(args: Arguments, rows: int) -> bool:
    """True if the actor's forward runs for every rollout of ``rows`` rows, audited or not."""
    kl_reward = args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss
    return kl_reward or trains_on_old_log_probs(args, rows)
