"""Checks of the disks for results. Must not import Ray, which the driver has not set up yet."""

import math
import os
from pathlib import Path

from openrlhf_gtpo.checkpoints.folder import missing_operation
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.platform.files import existing_parent, free_bytes, gigabytes
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.settings.run import steps_in_flight

# Bytes per parameter: the weight in bfloat16; the weight in float32 with Adam's two moments.
_WEIGHT_BYTES = 2
_STATE_BYTES = 12
# Per token of a row: its number, whether it is an action, log-prob, version, and the sampler's two values.
_TOKEN_BYTES = 4 + 1 + 4 + 4 + 8


def writes_checkpoints(args: Arguments) -> bool:
    """True if the run was told to save or load checkpoints, or keeps the best one by an evaluation, as upstream does
    with any ``--ckpt.save_steps``. A request to stop may make any other run save one too."""
    ckpt = args.ckpt
    keeps_best = args.eval.dataset and math.isfinite(args.eval.steps) and ckpt.best_metric_key != "none"
    return not ckpt.disable_ds and bool(
        math.isfinite(ckpt.save_steps) or ckpt.stop_file or ckpt.load_enable or keeps_best
    )


def check_room(args: Arguments, model: Model) -> None:
    """Refuse folders that cannot be written to, and disks that lack an operation which checkpoints need, or room for
    the trained model or one checkpoint, if the model's size and the free space are known.

    Does not check disk quotas. A disk with room for one checkpoint but not for ``--ckpt.max_num`` of them passes.

    Raises:
        UsageError: a folder cannot be written to, or its contents would not fit.
    """
    # Every folder can be written to, and a checkpoint's disk can do what publishing one takes.
    folders = {"--ckpt.output_dir": args.ckpt.output_dir, "--ckpt.path": args.ckpt.path}
    folders |= {"--logger.tensorboard_dir": args.logger.tensorboard_dir} if args.logger.tensorboard_dir else {}
    for flag, path in folders.items():
        there = existing_parent(Path(path, "_actor") if flag == "--ckpt.path" else path)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UsageError(f"{flag} {path} cannot be written: {there} is not a writable folder; give another path.")
    if writes_checkpoints(args) and (missing := missing_operation(existing_parent(args.ckpt.path))):
        raise UsageError(
            f"--ckpt.path {args.ckpt.path} is on a disk that cannot {missing}, which checkpoints need; give a path on "
            "another disk."
        )
    # Room for the model, and for one checkpoint with what is sampled ahead.
    parameters = model.parameters
    if parameters is None:
        return
    needs = [("--ckpt.output_dir", args.ckpt.output_dir, "the trained model", parameters * _WEIGHT_BYTES)]
    if writes_checkpoints(args):
        what = f"one checkpoint of {model.name}"
        trained = parameters if args.actor.lora is None else 0  # adapters are small
        needs.append(("--ckpt.path", args.ckpt.path, what, checkpoint_bytes(trained) + ahead_bytes(args, model)))
    for flag, path, what, needed in needs:
        free = free_bytes(path)
        if free is not None and free < needed:
            raise UsageError(
                f"{flag} {path} is on a disk with {gigabytes(free)} free, but {what} takes about {gigabytes(needed)}; "
                f"free some space, or change {flag}."
            )


def checkpoint_bytes(parameters: int) -> int:
    """Return a lower bound on a checkpoint's size, in bytes: weights and optimizer states."""
    return parameters * (_WEIGHT_BYTES + _STATE_BYTES)


def ahead_bytes(args: Arguments, model: Model) -> int:
    """Return the bytes that rows sampled ahead take in a checkpoint, with ``--data.max_len`` tokens each; 0 if engines
    do not sample ahead."""
    if not args.train.async_enable:
        return 0
    steps = steps_in_flight(args.train.max_staleness) if args.train.partial_rollout_enable else 1
    tokens = steps * args.rollout.batch_size * args.rollout.n_samples_per_prompt * args.data.max_len
    if not args.rollout.replays_routes:
        return tokens * _TOKEN_BYTES
    shape = ModelShape.of(model.config)
    return tokens * (_TOKEN_BYTES + shape.num_layers * shape.experts_per_token * (1 if shape.num_experts < 256 else 2))
