"""The source of a run's entropies and old log-probs: ``--rollout.entropy`` and ``--rollout.log_probs``, checked
against every flag that matters for them."""

import sys

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.credit.old_policy import always_forwards, count_rows, count_steps
from openrlhf_gtpo.training.settings.frozen import changed
from openrlhf_gtpo.training.settings.guard import why_no_sampler_entropy, why_no_scheduler

_CORRECTION = "--algo.advantage.is_correction_level"


def choose_entropy(args: Arguments) -> str:
    """Return ``--rollout.entropy`` as sampler or actor, and print a line on stderr if it may surprise the user.

    Raises:
        UsageError: this run cannot use the source.
    """
    rollout, chosen = args.rollout, args.rollout.entropy
    rows = count_rows(args)
    steps = count_steps(rows, args.train.batch_size) * args.train.max_epochs
    # The sampler, unless that is impossible. If the forward runs anyway, auto takes the actor's.
    if chosen != "actor":
        asked, chosen = chosen, "sampler"
        args = changed(args, {"rollout.entropy": chosen})
        why = impossible = _why_not(args)
        if impossible and asked == "sampler":
            raise UsageError(f"--rollout.entropy sampler cannot work here: {impossible}; leave it out.")
        if not impossible and always_forwards(args, rows):
            why = f"the {steps} optimizer steps of a rollout need its log-probs (--rollout.log_probs)"
            if rollout.joined_by:
                why = f"rows that join a rollout ({rollout.joined_by}) need its log-probs"
            elif args.critic.freezing_steps >= 0:
                why = "an actor that waits for its critic (--critic.freezing_steps) needs its log-probs"
            elif steps == 1:
                why = "the KL reward needs its log-probs (--algo.kl.use_loss or --algo.kl.init_coef 0 avoids that)"
            why = f"the old-policy forward runs anyway, because {why}"
        if not why and asked == "auto" and (why := why_no_scheduler()):
            why = f"vLLM would send values token by token, which may take longer than the forward, because {why}"
        if why and asked == "sampler":
            print(f"--rollout.entropy sampler saves no time: {why}.", file=sys.stderr)
        elif impossible or why and not args.train.async_enable:  # there, the actor is a later policy
            print(f"--rollout.entropy auto chose the actor: {why}.", file=sys.stderr)
            chosen = "actor"
    # The old log-probs of several optimizer steps.
    if rollout.log_probs == "sampler":
        _check_log_probs(changed(args, {"rollout.entropy": chosen}), steps)
        if steps > 1:
            print(
                f"--rollout.log_probs sampler: each of a rollout's {steps} optimizer steps takes its own log-probs as "
                f"the old ones, so only {_CORRECTION} bounds the distance to the policy that sampled.",
                file=sys.stderr,
            )
    return chosen


def _why_not(args: Arguments) -> str | None:
    """Return why the sampler cannot give this run's entropies, as a clause; None if it can."""
    estimator, images = args.algo.advantage.estimator, args.data.max_images_per_prompt
    for holds, why in (
        (
            not captures_entropy(args),
            f"--algo.advantage.estimator {estimator} reads no entropies, and --logger.entropy_enable is off",
        ),
        (args.rollout.top_p != 1, f"--rollout.top_p {args.rollout.top_p:g} cuts the distribution that entropies need"),
        (images > 0, f"with --data.max_images_per_prompt {images}, image tokens lie between the sampled ones"),
        (args.rollout.forward_for is not None, args.rollout.forward_for),
    ):
        if holds:
            return why
    return why_no_sampler_entropy()


def _check_log_probs(args: Arguments, steps: int) -> None:
    # Each condition needs the actor's log-probs, which would be missing; the last one, a bound in their place.
    coefficient = args.algo.kl.init_coef
    for refused, why in (
        (
            coefficient > 0 and not args.algo.kl.use_loss,
            f"saves the forward whose log-probs --algo.kl.init_coef {coefficient:g} turns into a reward; give "
            "--algo.kl.use_loss too, or --algo.kl.init_coef 0",
        ),
        (
            args.algo.kl.unbiased_gradient and coefficient > 0 and steps > 1,
            f"saves the forward whose log-probs --algo.kl.unbiased_gradient needs with {steps} optimizer steps; drop "
            "--algo.kl.unbiased_gradient",
        ),
        (
            args.rollout.entropy == "actor",
            "saves the actor's forward, which the entropies come from; give --rollout.entropy sampler too",
        ),
        (
            args.rollout.joined_by is not None,
            f"saves the forward whose log-probs a step needs if other rows join it; drop {args.rollout.joined_by}",
        ),
        (
            args.critic.freezing_steps >= 0,
            "saves the forward whose log-probs an actor needs if it waits for its critic; drop "
            "--critic.freezing_steps",
        ),
        (
            args.algo.advantage.is_correction_level == "off",
            f"trains without a ratio to the old policy; give {_CORRECTION} token or seq too",
        ),
    ):
        if refused:
            raise UsageError(f"--rollout.log_probs sampler {why}, or leave --rollout.log_probs out.")
