"""From a command line to a run: guard, parse, check, adapt to the platform, patch, and upstream's own ``train``."""

import os
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace

from openrlhf_gtpo import platform
from openrlhf_gtpo.integration import cpu_run, flags, upstream_parser
from openrlhf_gtpo.integration.checks import check_cluster, check_inputs
from openrlhf_gtpo.integration.credit import entropy_credit
from openrlhf_gtpo.integration.errors import TrainingStopped, UsageError
from openrlhf_gtpo.integration.guard import check_openrlhf
from openrlhf_gtpo.integration.megatron_checks import check_megatron

# What upstream sets in its workers' environment, with upstream's defaults.
_UPSTREAM_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}


def parse(argv: Sequence[str]) -> SimpleNamespace:
    """Upstream's arguments and this package's for ``argv``, with an estimator's settings validated.

    Raises:
        UsageError: a flag or combination that cannot work.
    """
    check_openrlhf()
    platform.choose()
    args = upstream_parser.parse(argv, flags.add_flags, flags.adjust)
    entropy_credit(args)
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
        TrainingStopped: data that must not be learned from.
    """
    args = checked(argv)

    import ray
    from openrlhf.cli import train_ppo_ray

    from openrlhf_gtpo.integration import patch

    patch.apply(args.actor.backend)
    start_ray(args, cpu_run.logical_gpus(args))
    # A terminated run ends its workers and engines, as an interrupted one does. Ray's own handler, which it has just
    # installed, would abort the process instead.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        train_ppo_ray.train(args)
    except ray.exceptions.RayTaskError as error:
        stopped = _cause(error, TrainingStopped)
        if stopped is None:
            raise
        raise TrainingStopped(str(stopped)) from None
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


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The innermost exception of ``kind`` behind a Ray task error.

    Ray nests one task's error in another's, and makes each an instance of its cause's class too, with the whole remote
    traceback as its text; only the innermost one says what it said when it was raised.
    """
    found: BaseException | None = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            found = error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return found
