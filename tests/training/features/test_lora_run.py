"""Adapters where features cross: in whole runs without Ray, a row's reference is the actor's own forward without
adapters, whoever sampled the row, whenever, and in whichever run it was drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf_gtpo.training.actors.dispatch import FORWARDS, ReferenceOfActor
from tests.training.controller import test_rollouts, test_stream

LORA = ("--ds.lora.rank", "4", "--actor.adam.lr", "1e-5", "--algo.kl.init_coef", "0.01", "--algo.kl.use_loss")
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "in turn": (test_rollouts.Run, ()),
    "one step off": (test_rollouts.Run, test_rollouts.AHEAD),
    "one step off, guided": (test_rollouts.Run, (*test_rollouts.AHEAD, *test_rollouts.GUIDE)),
    "in flight": (test_stream.Run, ()),
    "in flight, filtered": (test_stream.Run, ("--algo.dynamic_filtering_enable",)),
}


def without_adapters(sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probs that belong to these tokens alone."""
    return -0.1 * sequences[:, -mask.shape[1] :].float() * mask


def run_of(kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path, loaded: Any = None) -> Any:
    """A run in which the actors are asked for the reference, as ``Groups`` makes it."""
    make, flags = KINDS[kind]
    run = make(monkeypatch, folder, 16, *flags, *LORA, loaded=loaded)
    actors, forward = run.actors, run.actors.async_run_method_batch

    def answer(method_name: str, **columns: Any) -> list[list[Any]]:
        if method_name != FORWARDS[1]:
            return forward(method_name, **columns)
        return [[without_adapters(*pair) for pair in zip(columns["sequences"], columns["action_mask"], strict=True)]]

    actors.async_run_method_batch = answer
    assert run.args.ref.is_actor
    models = run.controller.maker.models
    run.controller.maker.models = models._replace(reference=ReferenceOfActor(actors))
    return run


def assert_references(run: Any) -> None:
    experiences = [experience for step in run.actors.dealt for experience in step]
    assert experiences
    for rows in experiences:
        expected = without_adapters(rows.sequences, rows.action_mask)
        torch.testing.assert_close(rows.base_action_log_probs * rows.action_mask, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_its_own_reference(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = run_of(kind, monkeypatch, tmp_path / "whole")
    run.controller.fit()
    assert_references(run)
    tag, checkpoint = next(iter(run.actors.saved.items()))
    again = run_of(kind, monkeypatch, tmp_path / tag, checkpoint["client_states"])
    again.controller.fit()
    assert_references(again)
    assert len(again.actors.trained) == len(run.actors.trained) - 1
