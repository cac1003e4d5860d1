"""Prompts are shared where that is the same, and a run says which it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.training.actors import shared_prompts as on_deepspeed
from openrlhf_gtpo.training.actors.policy_model import PLAIN_HEADS
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks import shared_prompts
from openrlhf_gtpo.training.settings.frozen import changed, freeze
from tests.support.rollouts import arguments

MEGATRON = ("--actor.backend", "megatron")


def decided(*argv: str, **config: Any) -> Arguments:
    """The arguments after the decision, for models of a ``config``."""
    args = freeze(arguments("--algo.advantage.estimator", "gtpo", *argv))
    given: dict[str, Any] = {"model_type": "llama", "attention_dropout": 0.0} | config
    models: Any = [SimpleNamespace(config=SimpleNamespace(**given))]
    return changed(args, shared_prompts.decide(args, models))


def test_the_names_are_the_same_everywhere() -> None:
    assert shared_prompts._NAME == on_deepspeed.NAME and shared_prompts.FAMILIES == PLAIN_HEADS


@pytest.mark.parametrize("argv", [(), MEGATRON])
def test_they_are_by_default(argv: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    args = decided(*argv)
    assert args.train.shares_prompts
    assert (args.ds.attn_implementation == on_deepspeed.NAME) == args.ds.packing_samples == (not argv)
    assert "computed once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "config", "reason"),
    [
        (("--train.shared_prompts", "off"), {}, ""),
        (("--ds.attn_implementation", "eager"), {}, "--ds.attn_implementation eager"),
        (("--ds.lora.rank", "4", "--ds.lora.dropout", "0.1"), {}, "--ds.lora.dropout"),
        (("--actor.aux_loss_coef", "0.1"), {}, "balancing loss"),
        (("--ds.use_liger_kernel",), {}, "Liger"),
        ((*MEGATRON, "--megatron.context_parallel_size", "2"), {}, "context_parallel_size"),
        ((), {"model_type": "gemma3_text"}, "gemma3_text"),
        ((), {"model_type": "mistral", "sliding_window": 4096}, "window"),
        ((), {"layer_types": ["full_attention", "sliding_attention"]}, "window"),
        ((), {"attention_dropout": 0.1}, "dropout"),
    ],
)
def test_they_are_not(
    argv: tuple[str, ...], config: dict[str, Any], reason: str, capsys: pytest.CaptureFixture
) -> None:
    args = decided(*argv, **config)
    assert not args.train.shares_prompts and args.ds.attn_implementation != on_deepspeed.NAME
    assert not args.ds.packing_samples
    said = capsys.readouterr().err
    assert ("with each response" in said and reason in said) if reason else said == ""


def test_a_window_that_is_off_is_none() -> None:
    config = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}
    assert decided(model_type="qwen2", **config).train.shares_prompts
