"""Earlier runs' files in a run's folders: what it resumes from, and what it must not replace."""

from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import (
    MANIFEST,
    backend_of,
    candidate,
    names,
    newest_whole,
    read_manifest,
)
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.files import check_output
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.report.names import KIND_RUN
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.origin import ORIGIN, Origin


def checkpoint_folders(args: Arguments) -> list[Path]:
    """Return the folder of the actor's checkpoints and, in a run with a critic, the critic's; both are needed."""
    roles = ("_actor", "_critic") if args.critic.model_name_or_path else ("_actor",)
    return [Path(args.ckpt.path, role) for role in roles]


def resumes(args: Arguments) -> bool:
    """True if the run resumes from a checkpoint."""
    return bool(args.ckpt.load_enable) and newest_whole(*checkpoint_folders(args)) is not None


def way_on(args: Arguments) -> str:
    """Say how to resume a run that ended early, as the end of a sentence."""
    newest = None
    if not args.ckpt.disable_ds:
        with suppress(CheckpointError):
            newest = newest_whole(*checkpoint_folders(args))
    if newest is None:
        again = "" if args.ckpt.disable_ds else "; rerun with --ckpt.load_enable to start over in the same folders"
        return f"there is no checkpoint to resume from{again}"
    return f"rerun with --ckpt.load_enable to resume from {newest}"


def check_earlier_runs(args: Arguments) -> None:
    """Refuse to replace an earlier run's results, or to resume from what cannot be loaded.

    Raises:
        UsageError: from the checks below.
    """
    check_checkpoints(args)
    check_metrics_file(args)
    check_results(args)


def check_checkpoints(args: Arguments) -> None:
    """Refuse to start over in a folder whose checkpoints or models the new run would replace, or to resume from
    checkpoints that cannot be loaded.

    Raises:
        UsageError: ``--ckpt.path`` has such files, or lacks the checkpoint that ``--ckpt.load_tag`` names, or its
            rows were sampled with other settings.
    """
    # A new run.
    ckpt, folders = args.ckpt, checkpoint_folders(args)
    if not ckpt.load_enable:
        there = sorted({name for folder in folders for name in names(folder)})
        models = [*Path(ckpt.path).glob("*_hf")] if ckpt.save_hf else []
        if there and not ckpt.disable_ds:
            raise UsageError(
                f"--ckpt.path {ckpt.path} has checkpoints of an earlier run ({', '.join(there)}), which this one "
                "would replace; give --ckpt.load_enable to resume from them, or another folder to start over."
            )
        if models:
            raise UsageError(
                f"--ckpt.path {ckpt.path} has {min(models).name} of an earlier run, which this one could replace; "
                "give another folder."
            )
        return
    # A resumed one: find its checkpoint, with the critic's part.
    try:
        path = candidate(folders, ckpt.load_tag)
        if path is not None and ckpt.load_tag is None:
            path = newest_whole(*folders)
            if path is None:
                raise CheckpointError(
                    f"none of the checkpoints in {folders[0]} is complete ({', '.join(names(folders[0]))}); give "
                    "another folder to start over."
                )
        backend = backend_of(path) if path is not None else args.actor.backend
        places = [] if path is None else [folder / path.name for folder in folders]
        manifests = [read_manifest(place) if (place / MANIFEST).is_file() else {} for place in places]
    except CheckpointError as error:
        flag = "--ckpt.load_enable" if ckpt.load_tag is None else "--ckpt.load_tag"
        raise UsageError(f"{flag}: {error}") from error
    # Backend, settings and number of processes must fit this run.
    if backend != args.actor.backend:
        raise UsageError(
            f"--ckpt.load_enable: {path} was written with --actor.backend {backend}; give that, or another folder."
        )
    saved = manifests[0].get(ORIGIN) if manifests else None
    list(Origin(args).differences(saved or {}))  # raises; the controller prints what is not refused
    for role, place, manifest in zip(("actor", "critic"), places, manifests):
        before = manifest.get("world_size")
        now = getattr(args, role).num_nodes * getattr(args, role).num_gpus_per_node
        divided = backend == "deepspeed" and args.ds.zero_stage > 0 and not args.ds.use_universal_ckpt
        if divided and before not in (None, now):  # None: an earlier version wrote it
            raise UsageError(
                f"--ckpt.load_enable: {place} was written by {before} processes, and DeepSpeed's ZeRO cannot divide "
                f"it among {now}; give --{role}.num_nodes × --{role}.num_gpus_per_node {before} GPUs, as before."
            )


def check_results(args: Arguments) -> None:
    """Refuse to write the trained model over another model.

    Raises:
        UsageError: ``--ckpt.output_dir`` holds a model, and this run does not resume one that may have written it.
    """
    output = Path(args.ckpt.output_dir)
    for role in ("actor", "reward", "critic"):
        source = getattr(args, role).model_name_or_path
        if source and output.is_dir() and Path(source).is_dir() and output.samefile(source):
            raise UsageError(
                f"--ckpt.output_dir {output} is the --{role}.model_name_or_path, which the trained model would "
                "replace; name another folder."
            )
    critic = args.critic.model_name_or_path and args.critic.save_value_network
    written = [output, Path(f"{output}_critic")] if critic else [output]
    there = [folder for folder in written if (folder / "config.json").exists()]
    if there and not resumes(args):
        raise UsageError(
            f"--ckpt.output_dir: {there[0]} holds a model, which the trained one would replace; name another folder, "
            "or remove it."
        )


def check_metrics_file(args: Arguments) -> None:
    """Refuse to append to the metrics of a run that this one does not resume, or to another kind of file; and to
    resume a run with another estimator or seed.

    If an unfinished run has no checkpoint for ``--ckpt.load_enable``, it died before its first one. The new start is
    then another run in the same file, as a requeued job needs. The same holds after a run that died in its first step.

    Raises:
        UsageError: ``--logger.metrics_path`` holds such a run, or cannot be written.
    """
    # A file with metrics of earlier runs.
    path = args.logger.metrics_path
    if not path:
        return
    check_output("--logger.metrics_path", Path(path))
    if not Path(path).exists() or Path(path).stat().st_size == 0:
        return
    try:
        rows = read_runs(path)[-1]
    except ValueError as error:
        raise UsageError(f"--logger.metrics_path: {error}; name a new file.") from error
    # A resumed run has the estimator and the seed of its earlier part.
    if resumes(args):
        start: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == KIND_RUN), {})
        for name, flag in (("estimator", "algo.advantage.estimator"), ("seed", "train.seed")):
            now = attrgetter(flag)(args)
            if start.get(name, now) != now:
                raise UsageError(
                    f"--logger.metrics_path {path} holds a run with --{flag} {start[name]}, but this run, which "
                    f"resumes from its checkpoint, has {now}; give the same, or other folders for another run."
                )
        return
    # A new run may follow only one that died before its first checkpoint.
    if not any(row["step"] for row in rows):
        return
    ended, steps = any(row.get("ended") for row in rows), max(row["step"] for row in rows)
    if not ended and not args.ckpt.load_enable and newest_whole(*checkpoint_folders(args)) is None:
        raise UsageError(
            f"--logger.metrics_path {path} holds a run of {steps} steps that died before its first checkpoint; give "
            "--ckpt.load_enable to start over in its folders, or choose another folder."
        )
    if ended or not args.ckpt.load_enable:
        why = "--ckpt.load_enable is not given"
        if args.ckpt.load_enable:
            why = f"--ckpt.path {args.ckpt.path} has no checkpoint"
        raise UsageError(
            f"--logger.metrics_path {path} holds a run of {steps} steps, and {why} to resume it; choose another "
            "folder for this run, or remove the earlier run."
        )
