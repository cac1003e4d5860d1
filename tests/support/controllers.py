"""A ``Controller`` over actors and engines made by hand, so that whole runs go on without Ray."""

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from openrlhf.trainer import ppo_trainer

from benchmarks.suite.synthetic import read_shape
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.actors.strategy import Strategy
from openrlhf_gtpo.training.checks.prompts import Prompts
from openrlhf_gtpo.training.controller import controller as module
from openrlhf_gtpo.training.controller.controller import Controller
from tests.support.fake_engines import Engine, Ready, Remote, handle
from tests.support.rollouts import PAD, arguments

# Four prompts a step, of which fake_engines' agent answers the odd ones with different scores.
_SAMPLING = ("--rollout.batch_size", "4", "--rollout.vllm_generate_batch_size", "4", "--train.full_determinism_enable")
_SAMPLING += ("--data.max_len", "64", "--rollout.max_new_tokens", "8", "--algo.dynamic_filtering_range", "0.5", "1.5")


class Group:
    """A group of Ray actors with one rank, whose references are their answers.

    Args:
        loaded: the client states of the checkpoint that it was started from.
        status: metrics of a training step, by its number among those that this group makes.

    Attributes:
        called: the method of each call, with the tag of a save.
        saved: by tag, what was saved.
        trained: KL coefficients that the steps were given.
        dealt: the experiences of each step.
        waited: whether a call was to wait until an asynchronous save is written.
    """

    placement_group = None

    def __init__(
        self, loaded: Mapping[str, Any] | None = None, status: Callable[[int], dict[str, Any]] = lambda number: {}
    ) -> None:
        self._loaded, self._status = dict(loaded or {}), status
        self._actor_handlers: list[Any] = []
        self.called: list[tuple[str, str | None]] = []
        self.saved: dict[str, dict[str, Any]] = {}
        self.trained: list[float] = []
        self.dealt: list[list[Any]] = [[]]
        self.waited: list[bool] = []

    def async_run_method(
        self, method_name: str, for_first: Mapping[str, Any] | None = None, **given: Any
    ) -> list[Any]:
        self.called.append((method_name, given.get("tag")))
        return [getattr(self, method_name, lambda **given: None)(**given, **(for_first or {}))]

    def ask_first(self, method_name: str) -> Any:
        return self.async_run_method(method_name)[0]

    def async_run_method_batch(self, method_name: str, **columns: Any) -> list[list[Any]]:
        if method_name == "append":
            self.dealt[-1] += columns["experience"]
            return [[None]]
        masks = columns["action_mask"]
        return [[TokenValues(-torch.ones(mask.shape), torch.ones(mask.shape)) for mask in masks]]

    def fit(self, kl_ctl: float) -> dict[str, Any]:
        self.trained.append(kl_ctl)
        self.dealt.append([])
        return dict(self._status(len(self.trained) - 1))

    def take_peak_memory(self) -> dict[str, int]:
        return {}

    def get_checkpoint_states(self) -> dict[str, Any]:
        return dict(self._loaded)

    def save_checkpoint(self, **given: Any) -> None:
        file = io.BytesIO()
        torch.save(given, file)
        file.seek(0)
        self.saved[given["tag"]] = torch.load(file)

    def finish_checkpoint(self, wait: bool) -> None:
        self.waited.append(wait)

    def saves(self) -> list[tuple[str, str | None]]:
        """The calls that concern checkpoints."""
        return [call for call in self.called if call[0] in ("save_checkpoint", "finish_checkpoint")]


class Tokenizer:
    pad_token_id = PAD

    def batch_decode(self, tokens: torch.Tensor, **options: Any) -> list[str]:
        return [str(row.tolist()) for row in tokens]


def engine_handle(engine: Engine | None = None) -> Any:
    """What the controller and its sampler have of a rollout actor."""
    loaded: Future[None] = Future()
    loaded.set_result(None)
    found = handle(engine or Engine())
    found.__ray_ready__ = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: loaded))
    found.take_peak_memory, found.serves = Remote(lambda phase: [{}]), Remote(lambda: None)
    found.pause_generation = found.resume_generation = Remote(lambda: None)
    return found


def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray whose references are values, or functions that return them; what was asked for last comes back first."""

    def get(refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [get(ref) for ref in refs]
        return refs() if callable(refs) else refs

    def wait(refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        return refs[-num_returns:], refs[:-num_returns]

    for name, stand_in in (("get", get), ("wait", wait), ("put", lambda value: Ready())):
        monkeypatch.setattr(ray, name, stand_in)


def run_arguments(folder: Path, *argv: str, estimator: str = "gtpo", samples: int = 3) -> SimpleNamespace:
    """The arguments of a run with its files in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    read_shape("tiny").save_pretrained(folder / "model")
    own = ("--ckpt.path", str(folder), "--logger.metrics_path", str(folder / "metrics.jsonl"), "--train.seed", "1")
    own += ("--actor.model_name_or_path", str(folder / "model"), "--algo.kl.init_coef", "0")
    return arguments("--algo.advantage.estimator", estimator, *_SAMPLING, *own, *argv, samples=samples)


class Data(Prompts):
    """Prompts that are their own labels."""

    def __init__(self, prompts: Sequence[str], args: SimpleNamespace) -> None:
        self.prompts = self.labels = prompts
        self.images, self.datasources = [None] * len(prompts), ["x"] * len(prompts)
        self.strategy = SimpleNamespace(args=args, arguments=args)
        self._rows = [row.encode() for row in prompts]


def controller(
    monkeypatch: pytest.MonkeyPatch,
    args: SimpleNamespace,
    actors: Group | None = None,
    prompts: int | Sequence[str] = 16,
    held_out: int = 0,
    engines: Sequence[Any] | None = None,
) -> Controller:
    """The controller of a run over ``prompts``, or "0", "1", ... if that is a number, and the first ``held_out`` of
    them."""
    no_ray(monkeypatch)
    texts = list(map(str, range(prompts))) if isinstance(prompts, int) else list(prompts)

    def prepare_datasets(strategy: Any, tokenizer: Any) -> tuple[Any, Any, None]:
        torch.seed()  # nobody seeds the controller's process
        loaders: list[Any] = [None, None]
        for place, (count, shuffle) in enumerate(((len(texts), True), (held_out, False))):
            if count:
                data = Data(texts[:count], args)
                loaders[place] = strategy.setup_dataloader(data, 1, False, shuffle, data.collate_fn)
        return loaders[0], loaders[1], None

    monkeypatch.setattr(ppo_trainer, "prepare_datasets", prepare_datasets)
    monkeypatch.setattr(module, "get_tokenizer", lambda *given, **options: Tokenizer())
    kind = type("RunController", (Controller,), {"features_of_run": run.features_of(args)})
    serving = [engine_handle()] if engines is None else list(engines)
    strategy = Strategy(seed=args.train.seed, args=args)
    return kind("model", strategy, actors or Group(), None, None, None, serving)
