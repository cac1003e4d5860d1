"""Where a run's numbers go: ``metrics.jsonl``, and OpenRLHF's loggers for TensorBoard and W&B."""

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
    """Upstream's logger; its logs are on disk before a checkpoint follows (torch's writer may hold them for 120 s). A
    full disk costs a log and not the run."""

    def log_train(self, *args: Any) -> None:
        self._log(super().log_train, *args)

    def log_eval(self, *args: Any) -> None:
        self._log(super().log_eval, *args)

    def _log(self, log: Callable[..., None], step: int, logs: Mapping[str, Any]) -> None:
        try:
            log(step, logs)
            self.writer.flush()
        except OSError as error:
            print(f"Warning: TensorBoard misses logs of step {step} ({error.strerror}).", flush=True)
            # Its thread may have ended; the next event opens another file.
            self.writer.file_writer = self.writer.all_writers = None

    def go_on(self, step: int) -> None:
        """Have TensorBoard discard what it was told about the steps after ``step``, which are run again."""
        self.writer.close()  # the next event opens a file, in which the purge comes first
        self.writer.purge_step = step + 1


class ResumedWandb(WandbLogger):
    """Upstream's logger; a run that is started again goes on in its W&B run, which gets each step once."""

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
    """All of a run's trackers, those that its arguments ask for."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._loggers: list[Any] = [ResumedWandb(args)] if args.logger.wandb.key else []
        self._tensorboard = FlushedTensorboard(args) if args.logger.tensorboard_dir else None
        self._loggers += [self._tensorboard] if self._tensorboard else []
        self._writer = MetricsWriter(args.logger.metrics_path) if args.logger.metrics_path else None

    def begin(self, step: int) -> Rows:
        """The run goes on after ``step``, or begins at 0. Returns the earlier lines of a run that goes on."""
        if self._tensorboard:
            self._tensorboard.go_on(step)
        if self._writer is None:
            return []
        args = self._args
        about = {"seed": args.train.seed, "estimator": args.algo.advantage.estimator}
        about[names.SAMPLES] = args.rollout.n_samples_per_prompt
        return self._writer.begin(step, about | offers(args))

    def phase(self, name: str) -> None:
        """What the run does now, for those who watch."""
        if self._writer:
            self._writer.phase(name)

    def train(self, step: int, metrics: Mapping[str, Any], notes: Mapping[str, str], stays: bool = True) -> None:
        """A step's metrics, and notes by name; ``generated_samples`` is a text with its reward.

        Args:
            stays: False for a step that the run ends for and makes again, which W&B would take only once.
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
        """Upstream's metrics of an evaluation, and ``more`` for ``metrics.jsonl``."""
        for logger in self._loggers:
            logger.log_eval(step, dict(metrics))
        if self._writer:
            self._writer.write(names.KIND_EVAL, step, {**metrics, **more})

    def flush(self) -> None:
        """Write what waits for room on a full disk."""
        path = self._args.logger.metrics_path
        if (writer := self._writer) is not None and path is not None:
            keep_trying(lambda _: writer.flush(), path)

    def close(self) -> None:
        """No step follows."""
        for logger in self._loggers:
            logger.close()

    def end(self) -> None:
        """The trained model is written."""
        if self._writer:
            self._writer.end()
            self.flush()
