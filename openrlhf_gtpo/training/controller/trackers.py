"""The destinations of a run's numbers: ``metrics.jsonl``, and OpenRLHF's loggers for TensorBoard and W&B."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter, Rows, is_number
from openrlhf_gtpo.training.actors.actor_trainer import keep_trying
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.offers import offers
from openrlhf_gtpo.training.controller.wandb_run import WandbRun

_SAMPLE_LENGTH = 2000  # characters kept from the end of a step's sample


class FlushedTensorboard(TensorboardLogger):
    """Upstream's logger, which flushes its logs to disk before a checkpoint follows (torch's writer may hold them for
    120 s). A full disk costs a log but not the run."""

    def log_train(self, *args: Any) -> None:
        self._log(super().log_train, *args)

    def log_eval(self, *args: Any) -> None:
        self._log(super().log_eval, *args)

    def _log(self, log: Callable[..., None], step: int, logs: Mapping[str, Any]) -> None:
        try:
            log(step, logs)
            self.writer.flush()
        except OSError as error:
            print(f"Warning: TensorBoard lacks the logs of step {step} ({error.strerror}).", flush=True)
            # Its thread may have ended; the next event opens another file.
            self.writer.file_writer = self.writer.all_writers = None

    def go_on(self, step: int) -> None:
        """Let TensorBoard discard the steps after ``step``, which the run repeats."""
        self.writer.close()  # the next event opens a file that begins with the purge
        self.writer.purge_step = step + 1


class ResumedWandb(WandbLogger):
    """Upstream's logger, which continues the W&B run of a resumed run and sends each step once."""

    def __init__(self, args: Any) -> None:
        self._run = WandbRun(args)
        self._run.open()
        super().__init__(args)

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        if self._run.takes(names.KIND_TRAIN, global_step):
            super().log_train(global_step, logs_dict)

    def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        if self._run.takes(names.KIND_EVAL, global_step):
            super().log_eval(global_step, logs_dict)


class Trackers:
    """All trackers that a run's arguments ask for."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._loggers: list[Any] = [ResumedWandb(args)] if args.logger.wandb.key else []
        self._tensorboard = FlushedTensorboard(args) if args.logger.tensorboard_dir else None
        self._loggers += [self._tensorboard] if self._tensorboard else []
        self._writer = MetricsWriter(args.logger.metrics_path) if args.logger.metrics_path else None

    def begin(self, step: int) -> Rows:
        """Begin a run at 0, or resume it after ``step``; returns the earlier lines of a resumed run."""
        if self._tensorboard:
            self._tensorboard.go_on(step)
        if self._writer is None:
            return []
        args = self._args
        about = {"seed": args.train.seed, "estimator": args.algo.advantage.estimator}
        about[names.SAMPLES] = args.rollout.n_samples_per_prompt
        about[names.TIMING_START] = time.time() - args.logger.started
        return self._writer.begin(step, about | offers(args))

    def phase(self, name: str) -> None:
        """Note the run's current phase, for watchers."""
        if self._writer:
            self._writer.phase(name)

    def train(self, step: int, metrics: Mapping[str, Any], notes: Mapping[str, str], stays: bool = True) -> None:
        """Write a step's metrics, and notes by name; ``generated_samples`` is a text with its reward.

        Args:
            stays: False for a step that ends the run and is repeated later, because W&B takes a step only once.
        """
        if self._writer:
            numbers = {name: value for name, value in metrics.items() if is_number(value)}
            sample = dict(zip((names.SAMPLE, names.SAMPLE_REWARD), metrics.get("generated_samples", ())))
            if sample:
                sample[names.SAMPLE] = sample[names.SAMPLE][-_SAMPLE_LENGTH:]
            self._writer.write(names.KIND_TRAIN, step, {**numbers, **sample, **notes})
        if stays and step % self._args.logger.logging_steps == 0:
            for logger in self._loggers:
                logger.log_train(step, dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float], more: Mapping[str, float]) -> None:
        """Write upstream's metrics of an evaluation, and ``more`` to ``metrics.jsonl``."""
        for logger in self._loggers:
            logger.log_eval(step, dict(metrics))
        if self._writer:
            self._writer.write(names.KIND_EVAL, step, {**metrics, **more})

    def flush(self) -> None:
        """Write lines that wait for room on a full disk."""
        path = self._args.logger.metrics_path
        if (writer := self._writer) is not None and path is not None:
            keep_trying(lambda _: writer.flush(), path)

    def close(self) -> None:
        """Close the loggers: no step follows."""
        for logger in self._loggers:
            logger.close()

    def end(self) -> None:
        """Note that the trained model is written."""
        if self._writer:
            self._writer.end()
            self.flush()
