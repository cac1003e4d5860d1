"""Flags that could make a run faster and fit its other settings, for the advice of ``report run``."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.settings import check_settings
from openrlhf_gtpo.training.settings import rules
from openrlhf_gtpo.training.settings.frozen import changed


def offers(args: Arguments) -> dict[str, str]:
    """Return the flags by ``names.OFFER_*``, as words of a command line. ``report/bounds.py`` decides from the run's
    numbers which of them would help."""
    found: dict[str, str] = {}
    if not args.rollout.is_sampled:
        return found

    def offer(name: str, changes: Mapping[str, Any]) -> None:
        if name not in found and _with(args, changes) is not None:
            words = (f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in changes.items())
            found[name] = " ".join(words)

    # Entropies without the old-policy forward.
    from_sampler: dict[str, Any] = {}
    if args.rollout.entropy == "actor":
        from_sampler["rollout.entropy"] = "sampler"
        automatic = _with(args, {"rollout.entropy": "auto"})  # the sampler, if that saves a forward pass
        if automatic is not None and automatic.rollout.entropy == "sampler":
            offer(names.OFFER_SAMPLER_ENTROPY, from_sampler)
    # Sampling beside training, a step ahead or with weights in flight.
    if not args.train.async_enable:
        ahead: dict[str, Any] = {"train.async_enable": True}
        if args.algo.advantage.is_correction_level == "off":
            ahead["algo.advantage.is_correction_level"] = "token"
            ahead["algo.advantage.is_correction_mode"] = "clip"
            ahead["algo.advantage.is_correction_threshold"] = 5
        offer(names.OFFER_ONE_STEP_OFF, ahead)
        offer(names.OFFER_ONE_STEP_OFF, ahead | from_sampler)  # if the estimator reads entropies
    elif not args.train.partial_rollout_enable:
        offer(names.OFFER_IN_FLIGHT, {"train.partial_rollout_enable": True})
    # Shared prompts, and fewer evaluations and checkpoints.
    if args.train.shared_prompts == "off":
        offer(names.OFFER_SHARED_PROMPTS, {"train.shared_prompts": "on"})
    every = {"eval.steps": args.eval.steps if args.eval.dataset else 0, "ckpt.save_steps": args.ckpt.save_steps}
    rarer = {flag: 2 * int(steps) for flag, steps in every.items() if 0 < steps < float("inf")}
    if rarer:
        offer(names.OFFER_RARER, rarer)
    return found


def _with(args: Arguments, changes: Mapping[str, Any]) -> Arguments | None:
    """Return ``args`` with ``changes``; None if the run would be refused. Prints nothing."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = rules.completed(changed(args, changes), frozenset())
            check_settings(found)
        except UsageError:
            return None
    return found
