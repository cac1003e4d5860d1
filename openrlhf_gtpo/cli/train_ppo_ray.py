"""``python3 -m openrlhf.cli.train_ppo_ray`` with GTPO and GRPO-S: the same flags and a few more (see ``--help``).

With ``--train.max_restarts`` or ``--train.stall_timeout`` this process only supervises. The run is the same command in
a child process, whose descendants are all ended before a restart. That repairs whatever breaks in a run or between its
processes (ranks, their groups, Ray itself), at the cost of one startup. The run itself replaces dead engines and
rewards. With ``--logger.metrics_path`` on a terminal, this process also supervises: it shows progress, and the run's
output goes to ``train.log`` beside the metrics.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from openrlhf_gtpo.cli import hide_key
from openrlhf_gtpo.training.arguments import Arguments

if __name__ == "__main__":
    hide_key()

from openrlhf_gtpo.checkpoints.folder import newest_whole
from openrlhf_gtpo.cli import report
from openrlhf_gtpo.errors import STOPPED_STATUS, Restartable, StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.tools.launch.process_tree import HUNG, run_and_clear
from openrlhf_gtpo.tools.launch.ray_node import close_own_ray
from openrlhf_gtpo.training.checks.live_runs import alone
from openrlhf_gtpo.training.checks.results import check_earlier_runs, checkpoint_folders, way_on
from openrlhf_gtpo.training.controller import stop
from openrlhf_gtpo.training.controller.wandb_run import WandbRun
from openrlhf_gtpo.training.run import check, parse, train

_SUPERVISED = "OPENRLHF_GTPO_SUPERVISED"  # set in the environment of a supervised run

_NOT_AGAIN = 65  # sysexits.h, EX_DATAERR: status of a supervised run that would fail again; its supervisor returns 1
_INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = {_INTERRUPTED: "interrupted", 128 + signal.SIGTERM: "terminated", 128 + signal.SIGHUP: "hung up"}
# After one of these statuses a run is not restarted: success, mistakes, requests.
_ENDS = (0, 2, _NOT_AGAIN, STOPPED_STATUS, *_SIGNALS)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the exit status.

    It is 0 if training completed, 2 for a user error, 1 if training cannot continue (bad data, a full disk, a dead
    node), 75 after a stop on request, and 128 + N if signal N ended it (130 after Ctrl-C).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    supervised = os.environ.pop(_SUPERVISED, None) is not None
    args: Arguments | None = None
    before = signal.signal(signal.SIGTERM, _terminate)  # until Ray starts and installs a handler that aborts
    try:
        args = parse(words)
        if supervised:  # the supervisor has run the checks and holds the locks
            train(args)
            return 0
        with ExitStack() as stack:
            # Check the arguments, and lock the files that the run writes.
            try:
                check(args)
                locks = stack.enter_context(alone(args))
                check_earlier_runs(args)  # an earlier run may have ended meanwhile
            except OSError as error:  # its text names the file, for example one without write permission
                raise UsageError(str(error)) from error
            if not args.ckpt.load_enable or args.ckpt.load_tag:  # W&B cannot go back to an earlier step
                WandbRun(args).forget()
            # Supervise a process with the same command, or train here.
            if args.train.max_restarts or args.train.stall_timeout or _log_of(args):
                command = [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *words]
                status = supervise(command, args, locks)
                if status == 0 and _log_of(args):
                    path = Path(args.logger.metrics_path or "")  # there is one, or no log
                    words = ["run", str(path), "--png", str(path.with_name("curves.png")), "--title", str(path.parent)]
                    report.main([*words, "--model", args.ckpt.output_dir])
            else:
                train(args)
                status = 0
    # Print how the run ended, in a sentence.
    except UsageError as error:
        print(f"train_ppo_ray: {error}", file=sys.stderr)
        return 2
    except Restartable as error:
        message = str(error) if supervised or args is None else f"{str(error).rstrip('.')}; {way_on(args)}."
        print(f"train_ppo_ray stopped: {message}", file=sys.stderr)
        return 1
    except TrainingStopped as error:
        print(f"train_ppo_ray stopped: {error}", file=sys.stderr)
        return _NOT_AGAIN if supervised else 1
    except StoppedOnRequest as error:
        print(f"train_ppo_ray stopped: {error}", file=sys.stderr)
        return STOPPED_STATUS
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as end:
        if end.code not in (signal.SIGTERM, 128 + signal.SIGTERM):  # Ray exits with 15 (2.55.0)
            raise
        status = 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    if status in _SIGNALS and not supervised:
        advice = "" if args is None else f"; {way_on(args)}"
        print(f"train_ppo_ray stopped: {_SIGNALS[status]}{advice}.", file=sys.stderr)
    return status


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def supervise(command: Sequence[str], args: Arguments, locks: Sequence[int] = ()) -> int:
    """Run ``command`` until it ends on purpose, with at most ``--train.max_restarts`` restarts, and leave none of its
    processes behind. Returns the exit status, as :func:`main` does.

    A request to stop that arrives between two starts applies to the next start: this process handles SIGUSR1, and the
    run does not take the request's file for an old one.

    Args:
        locks: descriptors of the run's locks. They outlive this process if its run does.
    """
    # The command of every start; a restart adds --ckpt.load_enable.
    stop.prepare(args)
    command = [*command, "--ckpt.stop_file", str(stop.stop_file(args))]
    command += ["--logger.wandb.run_name", args.logger.wandb.run_name]  # otherwise each start would use its own time
    limit, restarts = args.train.stall_timeout, args.train.max_restarts
    heartbeat, log = Heartbeat(args.ckpt.path), _log_of(args)
    before = _newest(args)
    stalled = f"no progress for {limit:g} s (--train.stall_timeout)"

    def hangs() -> bool:
        if not 0 < limit < heartbeat.silence():
            return False
        print(f"train_ppo_ray: {stalled}; ending the run.", file=sys.stderr, flush=True)
        return True

    for restart in range(1, restarts + 2):
        # Run it, and show the last lines of a run with a log.
        heartbeat.clear()
        environment = os.environ | {_SUPERVISED: "1"}
        logged = log.stat().st_size if log and log.exists() else 0
        with _on_screen(args) as output:
            status = run_and_clear(command, environment, hangs=hangs, locks=locks, **output)
        if log:
            words = log.read_bytes()[logged:].decode(errors="replace").splitlines()
            last = words[-1:] if status else []  # after a run that ended well, the text is a worker's warning
            for line in [line for line in words if line.startswith("train_ppo_ray")] or last:
                print(line, file=sys.stderr)
        heartbeat.clear()
        if status in _ENDS:
            return 1 if status == _NOT_AGAIN else status
        # It may succeed next time: say why it ended, and where the restart begins.
        why = f"the run ended with status {status} (see its last lines)"
        if status == HUNG:
            why = stalled
        elif status < 0:
            why = f"the run's driver was killed by signal {-status}"
        if restart <= restarts:
            newest = _newest(args)
            is_new = newest is not None and newest != before  # neither the requested checkpoint nor an earlier run's
            goes_on = is_new or newest is not None and args.ckpt.load_enable
            place = "resumes from its last checkpoint" if goes_on else "starts over, as there is no checkpoint yet"
            print(f"train_ppo_ray: {why}; restart {restart} of {restarts} {place}.", file=sys.stderr, flush=True)
            if is_new:
                command += ["--ckpt.load_enable", "--ckpt.load_tag", ""]
    tries = f", after {restarts} restarts" if restarts else ""
    print(f"train_ppo_ray stopped: {why}{tries}; {way_on(args)}.", file=sys.stderr)
    return 1


def _log_of(args: Arguments) -> Path | None:
    """The file for the run's output while a terminal shows its progress: beside its metrics. None without a terminal
    or metrics."""
    path = args.logger.metrics_path
    return Path(path).with_name("train.log") if path and sys.stdout.isatty() and sys.stderr.isatty() else None


@contextmanager
def _on_screen(args: Arguments) -> Iterator[dict[str, int]]:
    """On a terminal, show progress within this block, and send the run's output to a log."""
    log = _log_of(args)
    if log is None:
        yield {}
        return
    from openrlhf_gtpo.report.watch import watch
    from openrlhf_gtpo.training.checks.data import PROMPTS, table_rows

    log.parent.mkdir(parents=True, exist_ok=True)
    data, prompts = args.data, 0
    if args.rollout.is_sampled:
        assert data.prompt_dataset is not None
        prompts = table_rows(args, data.prompt_dataset, data.prompt_split, PROMPTS) or 0
    steps = min(prompts, data.max_samples) // args.rollout.batch_size * args.train.num_episodes
    over = threading.Event()
    metrics = Path(args.logger.metrics_path or "")  # there is one, or no log
    screen = threading.Thread(target=watch, args=(metrics, steps, lambda: not over.is_set()))
    print(f"The run's output goes to {log}.", file=sys.stderr)
    with log.open("ab") as file:
        screen.start()
        try:
            yield {"output": file.fileno()}
        finally:
            over.set()
            screen.join()


def _newest(args: Arguments) -> tuple[Path, int] | None:
    """The newest complete checkpoint, and when it was written."""
    path = newest_whole(*checkpoint_folders(args))
    return None if path is None else (path, path.stat().st_mtime_ns)


if __name__ == "__main__":
    close_own_ray(os.environ)
    sys.exit(main())
