"""Saving of a run's checkpoints: upstream's schedule and names, the best checkpoint, and full disks, which cost a
checkpoint but not the run.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ray

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.platform.files import is_full
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors.actor_trainer import keep_trying
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.failures import write_errors
from openrlhf_gtpo.training.credit.experiences import Models


class Saver:
    """Saves checkpoints, which the ranks write.

    Args:
        args: the run's arguments.
        models: the groups whose ranks write.
        on_try: called before each save.

    Attributes:
        failures: failures since the last :meth:`take_failures`.
    """

    def __init__(self, args: Arguments, models: Models, on_try: Callable[[], None]) -> None:
        self._args, self._models, self._on_try = args, models, on_try
        self._best_key: str = args.ckpt.best_metric_key or ""
        self._best = -math.inf
        self.failures: list[str] = []

    def take_failures(self) -> str:
        """Return why saves have failed since the last call, including an asynchronous one that has just ended."""
        self.publish()
        failures, self.failures = self.failures, []
        return " ".join(failures)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the best evaluation from a checkpoint's states, unless ``--ckpt.best_metric_key`` names another
        metric."""
        saved = states.get("best_eval_metric_key")
        if saved == self._best_key or (not self._best_key and saved != "none"):
            self._best_key = saved or self._best_key
            if (value := states.get("best_eval_metric_value")) is not None:
                self._best = value

    def save(self, step: int, states: dict[str, Any]) -> bool:
        """Save a checkpoint of ``step``; False if it could not be written. The next save tries again."""
        return self._try(lambda: self._save(step, states))

    def save_at_last(self, step: int, states: dict[str, Any]) -> None:
        """Save a checkpoint of ``step`` and wait until it is written, with retries on a full disk."""

        def save(path: str) -> None:
            with write_errors(self._args.ckpt):
                self._save(step, states)
                self._finish(wait=True)

        keep_trying(save, self._args.ckpt.path)

    def save_if_best(self, evaluated: Mapping[str, float], step: int, states: dict[str, Any]) -> None:
        """Save a checkpoint if this evaluation is the best so far, by ``--ckpt.best_metric_key`` or the first
        pass@1."""
        key = self._key_in(evaluated)
        if key is None:
            return
        value = evaluated[key]
        if not value > self._best:
            return
        before, self._best = self._best, value
        states |= {"best_eval_metric_key": key, "best_eval_metric_value": value, "latest_eval_metric_value": value}
        states["checkpoint_metric_key"] = key
        self.publish(wait=True)  # so that an earlier asynchronous save cannot fail in place of this one
        saved = self._try(lambda: self._write(f"best_global_step{step}", states, value, key))
        if self.publish(wait=True) and saved:
            print(f"Saved the best checkpoint so far, of step {step}: {key} {value:.4f}.", flush=True)
        else:
            self._best = before  # the best of a saved checkpoint

    def publish(self, wait: bool = False) -> bool:
        """Let idle ranks publish an asynchronous save if it is written by now; False if it failed."""
        return self._try(lambda: self._finish(wait))

    def _key_in(self, evaluated: Mapping[str, float]) -> str | None:
        if not self._best_key:
            self._best_key = next((key for key in sorted(evaluated) if key.endswith(names.EVAL_PASS1_SUFFIX)), "")
        return self._best_key if self._best_key in evaluated else None

    def _save(self, step: int, states: dict[str, Any]) -> None:
        states |= {"best_eval_metric_key": self._best_key, "best_eval_metric_value": self._best}
        states["latest_eval_metric_value"] = None  # this step's evaluation follows
        self._write(f"global_step{step}", states, None, self._best_key or None)

    def _write(self, tag: str, states: dict[str, Any], value: float | None, key: str | None) -> None:
        self._on_try()
        metric = {"metric_value": value, "metric_key": key}
        save = {"method_name": "save_checkpoint", "tag": tag, **metric}
        refs = self._models.actor.async_run_method(**save, for_first={"client_states": states})
        if self._models.critic is not None:
            refs += self._models.critic.async_run_method(**save)
        ray.get(refs)

    def _finish(self, wait: bool) -> None:
        if self._args.actor.backend == "megatron":  # DeepSpeed's checkpoints are complete when saving returns
            ray.get(self._models.actor.async_run_method(method_name="finish_checkpoint", wait=wait))

    def _try(self, save: Callable[[], Any]) -> bool:
        """Call ``save``; False if a checkpoint could not be written, in which case training continues."""
        try:
            with write_errors(self._args.ckpt):
                save()
        except CheckpointWriteError as error:
            self.failures.append(str(error))
            room = "Make room; training" if is_full(error) else "Training"
            print(f"Warning: {error} {room} continues, and the next save tries again.", flush=True)
            return False
        return True
