"""The source of entropies and old log-probs is chosen once, before any engine starts, and printed if it matters. What
cannot work is in ``command_lines.jsonl``."""

from collections.abc import Callable
from importlib import metadata

import pytest

from openrlhf_gtpo.training.features.sampler_entropy import source
from openrlhf_gtpo.training.features.sampler_entropy.source import choose_entropy
from openrlhf_gtpo.training.settings.frozen import freeze
from tests.support.rollouts import arguments

SAMPLER = {"--rollout.entropy": "sampler"}
# One optimizer step per rollout.
ONE = ("--algo.advantage.estimator", "gtpo", "--algo.kl.init_coef", "0", "--rollout.batch_size", "4")
KL_REWARD = ("--algo.kl.init_coef", "0.1")
TWO = ("--train.batch_size", "8")


def choose(*argv: str) -> str:
    return choose_entropy(freeze(arguments(*ONE, "--train.batch_size", "16", *argv)))


def test_an_unknown_vllm_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "why_no_sampler_entropy", lambda: "vLLM 0.1 is not known")
    assert refused(SAMPLER) == "--rollout.entropy sampler cannot work here: vLLM 0.1 is not known; leave it out."


def test_auto_takes_the_actor_if_values_would_leave_vllm_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source, "why_no_scheduler", lambda: "its scheduler is another one")
    assert choose("--rollout.entropy", "auto") == "actor"
    assert "token by token" in capsys.readouterr().err
    assert choose("--rollout.entropy", "sampler") == "sampler" and capsys.readouterr().err == ""


def test_the_default_is_the_actor_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "version", None)  # the engine's version is not looked at
    assert choose(*TWO, *KL_REWARD) == "actor" and capsys.readouterr().err == ""
