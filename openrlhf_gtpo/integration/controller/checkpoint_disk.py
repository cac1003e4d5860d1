"""The disk that checkpoints go to: whether one fits there before training, and what to do once one did not."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import ray
from safetensors import safe_open

from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.integration.controller.ray_errors import cause_of
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointWriteError

# bfloat16 weights; float32 weights and two moments of Adam.
_WEIGHT_BYTES, _OPTIMIZER_BYTES = 2, 12
# How torch's writer of archives says that the disk is full; it raises a RuntimeError.
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "file write failed")


def writes_checkpoints(args: SimpleNamespace) -> bool:
    """Whether the run was told to save or load checkpoints; a request to stop may make any run save one."""
    return not args.ckpt.disable_ds and bool(args.ckpt.save_steps > 0 or args.ckpt.stop_file or args.ckpt.load_enable)


def check_room(args: SimpleNamespace) -> None:
    """Refuse a disk on which not even one checkpoint fits; nothing where the model's size or the room is not known.

    Quotas are not seen here. A disk with room for one checkpoint and not for ``--ckpt.max_num`` passes.

    Raises:
        UsageError: it does not fit.
    """
    parameters = parameters_of(args.actor.model_name_or_path)
    if not writes_checkpoints(args) or parameters is None:
        return
    free = free_bytes(args.ckpt.path)
    needed = checkpoint_bytes(parameters)
    if free is not None and free < needed:
        raise UsageError(
            f"--ckpt.path {args.ckpt.path} is on a disk with {_gb(free)} free, and one checkpoint of "
            f"{args.actor.model_name_or_path} has about {_gb(needed)}; free some, or give --ckpt.path another disk."
        )


def checkpoint_bytes(parameters: int) -> int:
    """Size of a checkpoint, from below: weights and the optimizer's states."""
    return parameters * (_WEIGHT_BYTES + _OPTIMIZER_BYTES)


def parameters_of(model: str | None) -> int | None:
    """How many parameters the safetensors of a local model have, from their headers; None where there are none."""
    if not model or not Path(model).is_dir():
        return None
    count = 0
    for path in Path(model).glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                count += size
    return count or None


def free_bytes(path: str | Path) -> int | None:
    """Free on the disk that ``path`` is on, or would be; None where that cannot be asked."""
    folder = Path(path).absolute()
    try:
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None


@contextmanager
def write_errors(ckpt: SimpleNamespace, tag: str | None = None) -> Iterator[None]:
    """Turn the failure of an actor to write a checkpoint into a message that says what to do.

    Args:
        ckpt: the run's ``--ckpt.*``.
        tag: of the checkpoint that is being written; None where one from before may come to its end.

    Raises:
        TrainingStopped: it could not be written.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        reason = _write_failure(error, tag)
        if reason is None:
            raise
        free = free_bytes(ckpt.path)
        room = "" if free is None else f" The disk has {_gb(free)} free."
        raise TrainingStopped(
            f"{reason}{room} Free some (or give --ckpt.path another disk, or keep fewer with --ckpt.max_num) and start "
            f"the same command with --ckpt.load_enable: it goes on from {_last(ckpt.path)}."
        ) from error


def _write_failure(error: BaseException, tag: str | None) -> str | None:
    """One sentence; None where it was something else that failed."""
    known = cause_of(error, CheckpointWriteError)
    if known is not None:
        return str(known)
    if tag is None:
        return None
    failure: BaseException | None = cause_of(error, OSError)
    why = "could not be written"
    if failure is None:
        failure = cause_of(error, RuntimeError)
        if not any(words in str(failure) for words in _TORCH_WRITER):
            return None
        why += ", as it happens on a full disk"  # torch's words do not say so
    return f"The checkpoint {tag} {why}: {' '.join(str(failure).split())[:300]}."


def _last(path: str) -> str:
    try:
        return (Path(path) / "_actor" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return "the start, as there is no checkpoint before it"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
