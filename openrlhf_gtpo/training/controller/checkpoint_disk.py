"""The disk for checkpoints, and whether one fits on it. Must not import Ray, which the driver has not set up yet."""

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
# Of a row's token: its number, whether it is an action, log-prob, version, and the sampler's two values.
_TOKEN_BYTES = 4 + 1 + 4 + 4 + 8


def writes_checkpoints(args: Arguments) -> bool:
    """True if the run was told to save or load checkpoints, or is to keep the one that an evaluation finds best, as
    upstream does whatever ``--ckpt.save_steps`` says; a request to stop may make any run save one."""
    ckpt = args.ckpt
    keeps_best = args.eval.dataset and math.isfinite(args.eval.steps) and ckpt.best_metric_key != "none"
    return not ckpt.disable_ds and bool(
        math.isfinite(ckpt.save_steps) or ckpt.stop_file or ckpt.load_enable or keeps_best
    )


def check_room(args: Arguments, model: Model) -> None:
    """Refuse result folders that cannot be written to, a disk on which no checkpoint can be written, and one without
    room for the trained model or for even one checkpoint, if the model's size and the free space are known.

    Disk quotas are not checked. A disk with room for one checkpoint but not for ``--ckpt.max_num`` of them passes.

    Raises:
        UsageError: a folder cannot be written to, or what goes there does not fit.
    """
    folders = {"--ckpt.output_dir": args.ckpt.output_dir, "--ckpt.path": args.ckpt.path}
    folders |= {"--logger.tensorboard_dir": args.logger.tensorboard_dir} if args.logger.tensorboard_dir else {}
    for flag, path in folders.items():
        there = existing_parent(Path(path, "_actor") if flag == "--ckpt.path" else path)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UsageError(f"{flag} {path} cannot be written, because of {there}; give another path.")
    if writes_checkpoints(args) and (missing := missing_operation(existing_parent(args.ckpt.path))):
        raise UsageError(
            f"--ckpt.path {args.ckpt.path} is on a disk that cannot {missing}, as a checkpoint needs; give a path on "
            "another one."
        )
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
                f"{flag} {path} is on a disk with {gigabytes(free)} free, and {what} takes about {gigabytes(needed)}; "
                f"free some, or change {flag}."
            )


def checkpoint_bytes(parameters: int) -> int:
    """Lower bound on the size of a checkpoint, in bytes: the weights and the optimizer's states."""
    return parameters * (_WEIGHT_BYTES + _STATE_BYTES)


def ahead_bytes(args: Arguments, model: Model) -> int:
    """Size in a checkpoint, in bytes, of the rows that were sampled and not trained on, all of ``--data.max_len``
    tokens; 0 if engines do not sample ahead."""
    if not args.train.async_enable:
        return 0
    steps = steps_in_flight(args.train.max_staleness) if args.train.partial_rollout_enable else 1
    tokens = steps * args.rollout.batch_size * args.rollout.n_samples_per_prompt * args.data.max_len
    if not args.rollout.replays_routes:
        return tokens * _TOKEN_BYTES
    shape = ModelShape.of(model.config)
    return tokens * (_TOKEN_BYTES + shape.num_layers * shape.experts_per_token * (1 if shape.num_experts < 256 else 2))
