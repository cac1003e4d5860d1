"""A guide that a run cannot use is refused in one sentence, and one that samples nothing counts as no guide."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.features.guide.check import check_guide
from openrlhf_gtpo.training.run import parse
from tests.support.command_lines import argv_of, assert_names

pytestmark = pytest.mark.usefixtures("no_engine")


RESCUES = {"--algo.guide.rescue_batch": 4, "--algo.dynamic_filtering_enable": True}


@pytest.fixture
def guided(command: dict[str, Any], model: Path) -> dict[str, Any]:
    """A command line with a guide that passes every check."""
    return command | {"--algo.guide.model_name_or_path": model, "--algo.guide.fraction": 0.25}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"--algo.guide.fraction": 0.75},
        RESCUES | {"--algo.guide.fraction": 0},
        {"--algo.preset": "grpo", "--algo.advantage.estimator": None},
        {"--rollout.entropy": "sampler", "--algo.kl.init_coef": 0},
        {"--algo.advantage.is_correction_level": "token", "--algo.dynamic_filtering_enable": True},
        {"--train.colocate_all": True, "--vllm.gpu_memory_utilization": 0.5},
        RESCUES | {"--train.spike_zscore": 8},
    ],
    ids=str,
)
def test_what_a_guide_goes_with(guided: dict[str, Any], changes: dict[str, Any]) -> None:
    args = parse(argv_of(guided | changes))
    check_guide(args, Model(args.actor.model_name_or_path, "--actor.model_name_or_path"))
    assert args.algo.guide.gpu_memory_utilization == args.vllm.gpu_memory_utilization


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"--algo.guide.rescue_batch": 4}, "--algo.guide.rescue_batch --algo.dynamic_filtering_enable"),
        ({"--algo.guide.model_name_or_path": "/nowhere"}, "--algo.guide.model_name_or_path"),
        ({"--algo.guide.fraction": 0.8}, "--algo.guide.fraction"),
        ({"--algo.advantage.estimator": "reinforce", "--rollout.n_samples_per_prompt": 1}, "--algo.guide.fraction"),
        (
            {"--algo.kl.unbiased_gradient": True, "--algo.kl.use_loss": True, "--algo.kl.init_coef": 0.1},
            "--algo.guide.model_name_or_path --algo.kl.unbiased_gradient",
        ),
        (
            {"--algo.kl.target": 0.1, "--algo.kl.use_loss": True, "--algo.kl.init_coef": 0.1},
            "--algo.guide.model_name_or_path --algo.kl.target",
        ),
        ({"--algo.advantage.estimator": "gae"}, "--algo.advantage.estimator"),
        (
            {"--algo.advantage.estimator": "group_norm", "--data.max_images_per_prompt": 1},
            "--data.max_images_per_prompt --algo.guide",
        ),
        (
            {"--train.colocate_all": True, "--algo.guide.num_engines": 2},
            "--algo.guide.num_engines --train.colocate_all",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(
    guided: dict[str, Any], changes: dict[str, Any], names: str, refused: Callable[..., str]
) -> None:
    assert_names(refused(guided | changes), names)


def test_a_guide_with_a_tied_head_and_another_stored(
    guided: dict[str, Any], model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """vLLM would sample with the embedding as the head."""
    other = shutil.copytree(model, tmp_path / "guide")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    message = refused(guided | {"--algo.guide.model_name_or_path": other})
    assert message.startswith(f"--algo.guide.model_name_or_path {other}: lm_head.weight and ")


def test_a_guide_with_another_tokenizer_is_refused_with_the_first_token_that_differs(
    guided: dict[str, Any], model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    for change, first in (({"B": 33, "A": 34}, (33, "'B'", "'A'")), ({"new": 95}, (95, "'new'", "None"))):
        other = shutil.copytree(model, tmp_path / str(first[0]))
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] |= change
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        message = refused(guided | {"--algo.guide.model_name_or_path": other})
        place, there, here = first
        assert (
            f"a different tokenizer from the policy: token {place} is {there} for the guide and {here} for the policy"
            in message
        )


def test_an_endpoint_needs_the_tokenizer_alone(
    guided: dict[str, Any], model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "model.safetensors").unlink()
    served = guided | {"--algo.guide.model_name_or_path": other}
    assert "no weights" in refused(served)
    message = refused(served | {"--algo.guide.endpoint": "http://127.0.0.1:9/v1", "--rollout.temperature": 0.7})
    assert "--algo.guide.endpoint http://127.0.0.1:9/v1 does not answer like vLLM's http://HOST:PORT/v1: " in message


def test_its_own_code_is_refused(guided: dict[str, Any], model: Path, tmp_path: Path, refused: Any) -> None:
    other = shutil.copytree(model, tmp_path / "own")
    config = json.loads((other / "config.json").read_text()) | {"auto_map": {"AutoConfig": "x.Y"}}
    (other / "config.json").write_text(json.dumps(config))
    assert "brings its own Python code" in refused(guided | {"--algo.guide.model_name_or_path": other})
