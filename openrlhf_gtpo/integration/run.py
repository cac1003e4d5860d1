"""From a command line to a run: guard, parse, check, adapt to the platform, patch, and upstream's own ``train``."""

import os
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.integration.command_line import cpu_run, flags, upstream_parser
from openrlhf_gtpo.integration.command_line.checks import check_cluster, check_every_run, check_inputs
from openrlhf_gtpo.integration.command_line.guard import check_openrlhf
from openrlhf_gtpo.integration.command_line.megatron_checks import check_megatron
from openrlhf_gtpo.integration.controller import stop
from openrlhf_gtpo.integration.credit.entropy_credit import entropy_credit

# What upstream sets in its workers' environment, with upstream's defaults.
_UPSTREAM_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}


def parse(argv: Sequence[str]) -> SimpleNamespace:
    """Upstream's arguments and this package's for ``argv``, with what holds for every estimator and backend checked.

    Raises:
        UsageError: a flag or combination that cannot work.
    """
    check_openrlhf()
    platform.choose()
    args = upstream_parser.parse(argv, flags.add_flags, flags.adjust)
    entropy_credit(args)
    check_every_run(args)
    if platform.chosen_platform() == "cpu":
        cpu_run.adapt(args)
    return args


def checked(argv: Sequence[str]) -> SimpleNamespace:
    """As :func:`parse`, with everything checked that can be before any engine starts.

    Raises:
        UsageError: a flag, combination, input or cluster that cannot work.
    """
    args = parse(argv)
    check_megatron(args)
    check_inputs(args)
    check_cluster()
    return args


def train(argv: Sequence[str]) -> None:
    """Run OpenRLHF's training with ``argv``.

    Raises:
        UsageError: the user's mistake, before any engine starts.
        TrainingStopped: data that must not be learned from, a checkpoint that cannot be written, a node that died.
        StoppedOnRequest: the run was asked to stop, and can be gone on with.
    """
    args = checked(argv)
    stop.prepare(args)

    import ray
    from openrlhf.cli import train_ppo_ray

    from openrlhf_gtpo.integration import patch
    from openrlhf_gtpo.integration.controller.checkpoint_disk import check_room, write_errors
    from openrlhf_gtpo.integration.controller.cluster_checks import check_nodes
    from openrlhf_gtpo.integration.controller.ray_errors import cause_of, raise_if_lost

    check_room(args)

    patch.apply(args.actor.backend)
    start_ray(args, cpu_run.logical_gpus(args))
    # A terminated run ends its workers and engines, as an interrupted one does. Ray's own handler, which it has just
    # installed, would abort the process instead.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        check_nodes(args)
        with write_errors(args.ckpt):  # the last one may come to its end after the last step
            train_ppo_ray.train(args)
    except ray.exceptions.RayError as error:
        for kind in (TrainingStopped, StoppedOnRequest):
            ended = cause_of(error, kind)
            if ended is not None:
                raise kind(str(ended)) from None
        raise_if_lost(error)
        raise
    finally:
        ray.shutdown()


def start_ray(args: SimpleNamespace, gpus: int) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start a Ray of this host's own.

    Args:
        args: the run's arguments.
        gpus: what a CPU host counts as its GPUs, where the Ray is its own.

    Raises:
        UsageError: the named cluster does not answer.
    """
    import ray

    environment = {name: os.environ.get(name, value) for name, value in _UPSTREAM_ENVIRONMENT.items()}
    runtime_env: dict = {"env_vars": environment}
    options: dict = {}
    if platform.chosen_platform() == "cpu":
        from openrlhf_gtpo.platform import cpu

        environment |= cpu.environment() | cpu_run.environment(args)
        environment[platform.PLATFORM_VARIABLE] = "cpu"
        runtime_env["worker_process_setup_hook"] = "openrlhf_gtpo.platform.activate"
        options = cpu_run.ray_options(gpus)
    try:
        ray.init(runtime_env=runtime_env, **options)
    except ConnectionError as error:
        raise UsageError(
            f"No Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: {error}. Start one there, or "
            "unset RAY_ADDRESS to use a Ray of this host's own."
        ) from error
