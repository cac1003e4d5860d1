"""The policy actor answers with entropies, and trains each estimator with its own loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from openrlhf_gtpo.algorithms import SURROGATES
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.actors.policy_actor import EntropyPolicyActor
from openrlhf_gtpo.training.actors.policy_model import PolicyModel
from openrlhf_gtpo.training.credit.loss import CreditLoss, UpstreamLoss, make_policy_loss
from tests.support.rollouts import arguments

TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def forward(kind: str, *argv: str) -> tuple[Any, torch.Tensor, transformers.PreTrainedModel]:
    """The answer of a policy actor around a tiny model, the log-probs and entropies expected, and the model."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**TINY)).eval()
    model.config.use_cache = False
    actor = object.__new__(EntropyPolicyActor)
    actor.strategy = SimpleNamespace(arguments=arguments(*argv), ring_attn_group=None)
    actor.actor = PolicyModel(model, temperature=0.8)
    actor.actor.packing_samples = False
    sequences = torch.randint(1, 61, (2, 7))
    attention_mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    action_mask = torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0]])
    with torch.compiler.set_stance("force_eager"):
        answer = actor.forward(sequences, action_mask, attention_mask)
    logits = model(sequences, attention_mask=attention_mask).logits[:, :-1] / 0.8
    distribution = torch.distributions.Categorical(logits=logits)
    expected = torch.stack([distribution.log_prob(sequences[:, 1:]), distribution.entropy()]) * action_mask
    return answer, expected.detach(), model


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
@pytest.mark.parametrize("argv", [("gtpo",), ("grpo_s",), ("group_norm", "--logger.entropy_enable")], ids=str)
def test_a_forward_returns_log_probs_and_entropies(kind: str, argv: tuple[str, ...]) -> None:
    """Gemma2 goes through upstream's forward, whose output carries entropies in its own way."""
    answer, expected, model = forward(kind, "--algo.advantage.estimator", *argv)
    assert isinstance(answer, TokenValues)
    torch.testing.assert_close(torch.stack(answer), expected, rtol=1e-4, atol=1e-5)
    assert not answer.log_probs.requires_grad and not answer.entropy.requires_grad
    assert model.training, "upstream's forward leaves the model ready to train"


def test_a_forward_without_entropies_is_upstreams() -> None:
    answer, expected, _ = forward("Llama", "--algo.advantage.estimator", "group_norm")
    torch.testing.assert_close(answer, expected[0], rtol=1e-4, atol=1e-5)


def test_images_reach_the_forward_that_returns_entropies() -> None:
    """A vision-language model gives the log-probs of upstream's forward, which depend on the image."""
    torch.manual_seed(0)
    text = TINY | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "bos_token_id": 1, "eos_token_id": 1}
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 1, "patch_size": 2, "spatial_merge_size": 1}
    tokens = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    actor = object.__new__(EntropyPolicyActor)
    actor.actor = PolicyModel(transformers.Qwen2VLForConditionalGeneration(config))
    actor.actor.packing_samples, actor.actor.is_vlm, actor.actor._vlm_config = False, True, config
    sequences = torch.tensor([[3, 58, 60, 60, 60, 60, 57, 5, 7, 9]])
    mask = torch.tensor([[0] * 6 + [1] * 3])
    patches = torch.randn(4, 3 * 2 * 2 * 2)  # of two frames with three colors, two by two pixels each
    answers = []
    for argv in ((), ("--logger.entropy_enable",)):
        args = arguments("--algo.advantage.estimator", "group_norm", *argv)
        actor.strategy = SimpleNamespace(args=args, arguments=args, ring_attn_group=None)
        for pixels in (patches, 1 - patches):
            image = [[{"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}]]
            answers.append(actor.forward(sequences, mask, torch.ones_like(sequences), mm_train_inputs_list=image))
    first, second, ours, of_second = answers
    assert (first - second).abs().max() > 1e-4
    torch.testing.assert_close(ours.log_probs, first)
    torch.testing.assert_close(of_second.log_probs, second)
    assert (ours.entropy > 0).eq(mask > 0).all()


def loss_of(*argv: str) -> CreditLoss | UpstreamLoss:
    return make_policy_loss(arguments(*argv))


def test_the_loss_follows_the_estimator() -> None:
    gtpo = loss_of("--algo.advantage.estimator", "gtpo")
    assert isinstance(gtpo, CreditLoss) and gtpo.level == "token"
    assert (gtpo.options.clip_eps_low, gtpo.options.clip_eps_high) == (0.2, 0.28)

    correction = (
        "--algo.advantage.is_correction_level",
        "seq",
        "--algo.advantage.is_correction_threshold",
        "0.9",
        "1.1",
    )
    geometric = ("--algo.grpo_s.ratio_mean", "geometric", "--actor.dual_clip", "3", *correction)
    grpo_s = loss_of("--algo.advantage.estimator", "grpo_s", *geometric)
    assert isinstance(grpo_s, CreditLoss) and (grpo_s.level, grpo_s.ratio_mean) == ("sequence", "geometric")
    options = grpo_s.options
    assert (options.clip_eps_low, options.clip_eps_high, options.dual_clip) == (0.2, 0.28, 3)
    assert (options.is_correction_level, options.is_correction_threshold) == ("seq", [0.9, 1.1])

    for upstreams in (("--algo.advantage.estimator", "group_norm"), ("--algo.preset", "gspo")):
        assert isinstance(loss_of(*upstreams), UpstreamLoss)


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s", "group_norm", "rloo", "gae"])
@pytest.mark.parametrize("name", ["cispo", "sapo", "gspo_token"])
def test_the_loss_follows_the_surrogate_whoever_is_paid(name: str, estimator: str) -> None:
    kind = SURROGATES[name]
    chosen = ("--algo.advantage.estimator", estimator, "--actor.policy_loss_type", name)
    loss = loss_of(*chosen)
    assert isinstance(loss, CreditLoss) and loss.level == kind.aggregation
    assert loss.surrogate.func is kind.loss and loss.surrogate.keywords == {"config": kind.config()}
    settings = {"cispo": ("--actor.eps_clip", "0.3"), "sapo": ("--actor.sapo.tau_negative", "2")}
    of_config = {"cispo": {"clip_low": 0.3, "clip_high": 0.3}, "sapo": {"tau_negative": 2.0}}
    if name in settings:
        changed = loss_of(*chosen, *settings[name], "--actor.loss_agg_mode", "token-mean")
        assert isinstance(changed, CreditLoss) and changed.level == "token"
        assert changed.surrogate.keywords == {"config": kind.config(**of_config[name])}
