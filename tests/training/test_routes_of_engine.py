"""The experts that a real engine returns are those of the row's tokens, whatever it did meanwhile, and with them the
trainer is nearer to the sampler, at every layout."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.training.settings.guard import EITHER_RUNNER_RETURNS_EXPERTS, other_vllm
from tests.support import ROOT
from tests.support.logits_program import several
from tests.support.moe_program import LAYOUTS
from tests.support.rank_pool import RankPool
from tests.support.routing_program import LIVE, differences, log_probs
from tests.support.synced_engine import save_checkpoint

PROGRAM = ROOT / "tests" / "support" / "routes_program.py"
CONDITIONS = ("plain", "preempted", "prefixes_reused", "weights_sent_again", "not_held", "two_turns")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(other_vllm(EITHER_RUNNER_RETURNS_EXPERTS)), reason="this vLLM returns none on a CPU"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("mixture"), experts=8)


@pytest.fixture(scope="module")
def found(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By condition: rows of tokens, the place of the last answer, its log-probs, and the routes."""
    output = tmp_path_factory.mktemp("routes") / "rows"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.routes_program", checkpoint, output],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return pickle.loads(output.read_bytes())


def test_no_row_has_the_routes_of_another(checkpoint: Path, found: dict[str, Any]) -> None:
    """Transformers in float32 sends nearly all tokens to the same experts; others would agree by chance, 1 in 28."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[Any] = []
    for router in (module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)):
        router.register_forward_hook(lambda router, given, output: chosen.append(output[2].numpy()))
    assert found["preemptions"] > 5 and min(found["cached"]) > 0
    for condition in CONDITIONS:
        for tokens, _, _, routes in found[condition]:
            chosen.clear()
            with torch.no_grad():
                model(torch.tensor([tokens]))
            own, known = np.stack(chosen, axis=1), routes[:, 0, 0] != LIVE
            assert known.sum() == len(tokens) - (3 if condition == "two_turns" else 1) and known[:-3].all()
            differs = (np.sort(own, axis=2) != np.sort(routes, axis=2)).any(axis=2)
            for layer in range(routes.shape[1]):
                assert differs[known, layer].mean() < 0.25, (condition, layer)
            assert differs[known].mean() < 0.1, condition


@pytest.mark.parametrize("name", ["TP1", "PP2xEP2", "TP2-SPxEP2"])
def test_the_trainer_is_nearer_to_the_sampler(
    name: str, checkpoint: Path, found: dict[str, Any], ranks: RankPool
) -> None:
    layout: Layout = LAYOUTS[name]
    rows = [*found["plain"], *found["preempted"]]
    batches = [
        [(tokens, routes) for tokens, _, _, routes in rows[first : first + 4]] for first in range(0, len(rows), 4)
    ]
    shifted = [[(tokens, np.roll(routes, 1, axis=0)) for tokens, routes in batch] for batch in batches]
    calls = [
        (log_probs, (str(checkpoint), layout, "bfloat16", given, replays))
        for given, replays in ((batches, False), (batches, True), (shifted, True))
    ]
    answers = ranks.run(several, layout, calls)[0]
    mean = [np.abs(differences(rows, values)).mean() for values, _ in answers]
    live, replayed, wrong = mean
    print(
        f"{name}: mean |log pi - log pi of the sampler|: live {live:.2e}, replayed {replayed:.2e}, wrong {wrong:.2e}"
    )
    assert replayed <= 8e-3 and replayed <= 0.5 * live < wrong
