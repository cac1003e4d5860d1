"""Catches an engine that samples from weights other than the trainer's: stale, partly new, or under a wrong name.

Ray and vLLM are real. Every parameter changes by as much as its own spread, so that a parameter left behind moves the
log-probs ten times further than bf16 rounding does; a test checks this too.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import command_of
from tests.support.synced_engine import PREFIX, VOCABULARY, Synced, save_checkpoint

# Bounds on the mean and maximum over tokens of the difference that bf16 makes; observed: 0.013 and 0.06.
ROUNDING_MEAN, ROUNDING_MAX = 0.04, 0.3
LEFT_BEHIND_MEAN = 0.15

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def answers(synced: Synced) -> list[list[int]]:
    """Greedy answers to four prompts, one after the other: what a step computes together decides how it rounds."""
    import ray
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = [ray.get(synced.engine.generate.remote(row.tolist(), params)) for row in synced.tokens]
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_experts_that_are_sent_are_those_that_the_engine_computes_with(bundle: Any, tmp_path: Path) -> None:
    """vLLM packs them for its kernels, on CPU at the first load alone: checksums are of what it loaded, and say
    nothing of what it computes with."""
    import ray
    from safetensors.torch import load_file, save_file

    checkpoint = save_checkpoint(tmp_path, experts=8)
    synced = Synced(checkpoint, bundle, 1, 1.0)
    loaded = answers(synced)
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    others = {
        name: w + w.float().std() * torch.randn(w.shape, generator=generator) if "experts" in name else w
        for name, w in weights.items()
    }
    for transport in ("broadcast", "colocated", "broadcast"):
        synced.send(weights, 20_000, transport)
        assert answers(synced) == loaded, transport
        synced.send(others, 2**28, transport)
        assert answers(synced) != loaded, transport
    written = {name: w.bfloat16() for name, w in others.items()}
    save_file(written, checkpoint / "model.safetensors", {"format": "pt"})
    changed = answers(synced)
    ray.kill(synced.engine)
    again = Synced(checkpoint, bundle, 1, 1.0)
    assert answers(again) == changed
    ray.kill(again.engine)


@pytest.fixture(scope="module", params=[(True, 1, 0.7), (False, 2, 1.0)], ids=["tied", "untied-tp2"])
def synced(bundle: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import ray

    tied, *rest = request.param
    made = Synced(save_checkpoint(tmp_path_factory.mktemp("model"), tied), bundle, *rest)
    yield made
    ray.kill(made.engine)


def assert_equal_but_for_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found - expected).abs()
    assert difference.mean() < ROUNDING_MEAN and difference.max() < ROUNDING_MAX, difference


@pytest.mark.parametrize("transport", ["broadcast", "colocated"])
def test_the_engine_follows_every_transfer(synced: Synced, transport: str) -> None:
    before = synced.perturbed(100)
    synced.send(before, 20_000, transport)
    assert_equal_but_for_rounding(synced.engine_log_probs(), synced.trainer_log_probs(before))
    # One parameter per bucket, a few, a few again, all in one.
    for seed, bucket_bytes in enumerate([2, 20_000, 20_000, 2**28]):
        weights = synced.perturbed(seed)
        synced.send(weights, bucket_bytes, transport)
        found = synced.engine_log_probs()
        assert_equal_but_for_rounding(found, synced.trainer_log_probs(weights))
        assert (found - synced.trainer_log_probs(before)).abs().mean() > 3 * LEFT_BEHIND_MEAN, "as good as stale"
        before = weights


@pytest.mark.parametrize("transport", ["broadcast", "colocated"])
def test_no_prefix_of_older_weights_survives(synced: Synced, transport: str) -> None:
    import ray
    from vllm import SamplingParams

    prompt = torch.randint(1, VOCABULARY, (PREFIX,), generator=torch.Generator().manual_seed(6)).tolist()

    def cached_tokens() -> int:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return ray.get(synced.engine.generate.remote(prompt, params)).num_cached_tokens

    cached_tokens()
    assert cached_tokens() > 0, "nothing is cached: this test would show nothing"
    synced.send(synced.perturbed(20), 2**28, transport)
    assert cached_tokens() == 0


def test_a_response_that_is_paused_midway_goes_on_as_if_the_new_weights_had_read_all_of_it(synced: Synced) -> None:
    """Weights in flight: each token's log-prob and entropy are those of the weights that its version names, whose keys
    and values were computed again."""
    import ray

    old, new = synced.perturbed(60), synced.perturbed(61)
    begin, delay, differences = 20, 0.3, []
    while True:  # until the pause falls midway
        synced.send(old, 2**28, version=6)
        under_way = synced.ask(begin, max_tokens=PREFIX - begin, ignore_eos=True, logprobs=1)
        ray.wait([under_way], timeout=delay)
        ray.get(synced.engine.pause_generation.remote())
        synced.send(new, 2**28, version=7)
        ray.get(synced.engine.resume_generation.remote())
        rows = ray.get(under_way)
        drawn_by_old = [int((row.versions == 6).sum()) for row in rows]
        if all(10 < count < PREFIX - begin - 10 for count in drawn_by_old):
            break
        delay *= 0.5 if max(drawn_by_old) >= PREFIX - begin - 10 else 2
    for row in rows:
        versions = row.versions[begin:]
        assert set(versions) == {6, 7} and (np.diff(versions) >= 0).all()
        tokens = torch.from_numpy(row.tokens)[None]
        by_old, by_new = (synced.said_by(of, tokens, begin) for of in (old, new))
        said = torch.from_numpy(np.stack(row.values))[:, begin:]
        differences.append(said - torch.where(torch.from_numpy(versions) == 6, by_old, by_new))
    everything = torch.cat(differences, dim=1)
    assert_equal_but_for_rounding(everything, torch.zeros_like(everything))


@pytest.mark.parametrize("transport", ["broadcast", "colocated"])
def test_a_parameter_that_is_not_sent_is_named(synced: Synced, transport: str) -> None:
    from openrlhf_gtpo.weight_sync.receipts import WeightSyncError

    weights = synced.perturbed(30)
    layer = "model.layers.1."
    for name, engines_name in (
        ("model.norm.weight", "model.norm.weight"),
        (f"{layer}mlp.down_proj.weight", f"{layer}mlp.down_proj.weight"),
        (f"{layer}self_attn.k_proj.weight", f"{layer}self_attn.qkv_proj.weight"),
    ):
        with pytest.raises(
            WeightSyncError, match=f"{engines_name} was not loaded completely by worker 0 of vLLM engine 0"
        ):
            synced.send({n: w for n, w in weights.items() if n != name}, 20_000, transport)
    synced.send(weights, 20_000, transport)
    assert_equal_but_for_rounding(synced.engine_log_probs(), synced.trainer_log_probs(weights))


def test_one_parameter_left_behind_would_show(synced: Synced) -> None:
    old, new = synced.perturbed(10), synced.perturbed(11)
    synced.send(old, 20_000)
    synced.send(new, 20_000)
    found = synced.engine_log_probs()
    assert_equal_but_for_rounding(found, synced.trainer_log_probs(new))
    for name in new:
        expected = synced.trainer_log_probs({**new, name: old[name]})
        assert (found - expected).abs().mean() > LEFT_BEHIND_MEAN, name
    partial = next(iter(new))
    synced.send({**new, partial: old[partial]}, 20_000)
    with pytest.raises(AssertionError):
        assert_equal_but_for_rounding(synced.engine_log_probs(), synced.trainer_log_probs(new))


@pytest.mark.parametrize(
    ("prompt_tokens", "params"),
    [
        # All four begin in a block of 128 tokens each and then need a second one when none is left: most are
        # preempted and computed again.
        (100, {"max_tokens": 100, "ignore_eos": True}),
        (150, {"max_tokens": 50, "stop": ["e", "a"]}),  # the prompt's first block is in the cache
        (20, {"max_tokens": 8, "detokenize": False}),
    ],
    ids=["preempted", "stopped", "not-detokenized"],
)
def test_the_sampler_says_what_the_trainers_weights_say(
    synced: Synced, prompt_tokens: int, params: dict[str, Any]
) -> None:
    """Up to bf16, for whole distributions at the run's temperature; an engine with other weights does not."""
    weights, others = synced.perturbed(40), synced.perturbed(41)
    synced.send(weights, 2**28, version=40)
    differences, stale = [], []
    for row in synced.responses(prompt_tokens, logprobs=1, **params):
        tokens, start = torch.from_numpy(row.tokens)[None], prompt_tokens
        assert not row.mask[:start].any() and row.mask[start:].all() and row.values is not None
        said = torch.from_numpy(np.stack(row.values))
        assert said.shape == (2, len(row.tokens)) and not said[:, :start].any()
        assert row.log_probs.tolist() == row.values.log_probs.tolist()
        assert row.versions.tolist() == np.where(row.mask, 40, -1).tolist()
        for found, of in ((differences, weights), (stale, others)):
            found.append(said[:, start:] - synced.said_by(of, tokens, start))
    everything = torch.cat(differences, dim=1)
    assert_equal_but_for_rounding(everything, torch.zeros_like(everything))
    for of_other_weights in torch.cat(stale, dim=1):  # few tokens, drawn at random: two entropies may both be small
        with pytest.raises(AssertionError):
            assert_equal_but_for_rounding(of_other_weights, torch.zeros_like(of_other_weights))


def test_the_death_of_vllms_process_ends_a_transfer(synced: Synced) -> None:
    """The last test of an engine. vLLM itself never answers the calls that are under way."""
    import psutil
    from vllm.v1.engine.exceptions import EngineDeadError

    synced.send(synced.perturbed(50), 2**28)
    here = psutil.Process().children(recursive=True)
    (core,) = [process for process in here if "EngineCore" in command_of(process)]
    core.suspend()  # the call is under way when it dies
    threading.Timer(1, core.kill).start()
    with pytest.raises(EngineDeadError):
        synced.send(synced.perturbed(51), 2**28)
