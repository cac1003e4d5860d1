"""A held request's answer is what vLLM would have sent token by token, bit for bit, whatever happens meanwhile."""

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from openrlhf_gtpo.training.features.sampler_entropy.answers import versions
from tests.support import ROOT
from tests.weight_sync.test_vllm_sync import save_checkpoint

PROGRAM = ROOT / "tests" / "support" / "held_requests_program.py"

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each condition the answers both ways, and how often the engine preempted."""
    folder = tmp_path_factory.mktemp("held")
    model, output = save_checkpoint(folder / "model", tied=True), folder / "answers"
    ended = subprocess.run([sys.executable, PROGRAM, model, output], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return pickle.loads(output.read_bytes())


@pytest.mark.parametrize(
    ("condition", "answers"),
    [
        ("likely_tokens", 8),
        ("preempted", 64),
        ("prefixes_reused", 24),
        ("three_answers_each", 24),
        ("aborted", 32),
        ("beside_others", 32),
        ("no_values", 16),
        ("text", 16),
        ("stop_strings", 16),
        ("weights_changed", 16),
    ],
)
def test_nothing_is_lost_by_waiting(found: dict[str, Any], condition: str, answers: int) -> None:
    """Tokens, log-probs, entropies, versions, text, reason of the end, tokens of the prompt that were cached."""
    today, held = found[condition]["today"], found[condition]["held"]
    assert held == today
    assert sum(len(answer[0]) for answer in held if answer is not None) == answers


def test_the_conditions_were_met(found: dict[str, Any]) -> None:
    assert min(found[name]["preemptions"] for name in ("preempted", "aborted", "weights_changed")) > 10
    assert any(cached for _, cached in found["prefixes_reused"]["held"])
    assert {answer[5] for answers, _ in found["stop_strings"]["held"] for answer in answers} == {"stop"}


def test_each_token_has_the_version_of_the_weights_that_drew_it(found: dict[str, Any]) -> None:
    """They changed before steps 20 and 60; a response of 96 tokens got one at most in each step."""
    for [answer], _ in found["weights_changed"]["held"]:
        ranks = np.array([rank for rank, _ in answer[3]])
        drawn_by, counts = np.unique(versions(ranks), return_counts=True)
        assert drawn_by.tolist() == [0, 20, 60] and counts[0] <= 20 and counts[1] <= 40
        assert (np.diff(versions(ranks)) >= 0).all()
