"""Catches an engine that samples from weights other than the trainer's: stale, partly new, or under a wrong name.

Ray and vLLM are real. Every parameter changes by as much as its own spread, so that a parameter left behind moves the
log-probs ten times further than bf16 rounding does; a test checks this too.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

VOCABULARY, LENGTH = 96, 40
PREFIX = 200  # more than a block of vLLM's cache, 128 tokens on CPU
# Bounds on the mean and maximum over tokens of the difference that bf16 makes; observed: 0.013 and 0.06.
ROUNDING_MEAN, ROUNDING_MAX = 0.04, 0.3
LEFT_BEHIND_MEAN = 0.15

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bundle() -> Iterator[Any]:
    """Two GPUs' worth of this module's own Ray, started as a run starts it; engines take turns in it."""
    import os

    from openrlhf_gtpo import platform
    from openrlhf_gtpo.training import host

    os.environ.setdefault(platform.PLATFORM_VARIABLE, platform.detect())
    platform.activate()
    import ray

    args = SimpleNamespace(actor=SimpleNamespace(backend="deepspeed", num_nodes=1, num_gpus_per_node=1))
    host.start_ray(args, gpus=2)
    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2)
    ray.get(group.ready())
    yield group
    ray.shutdown()


def save_checkpoint(directory: Path, tied: bool) -> Path:
    """A random Llama (head dimension 32, the least that vLLM's CPU attention supports) and a tokenizer for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=" ", pad_token=" ", eos_token="~")
    tokenizer.save_pretrained(directory)
    return directory


class WithoutRayWorkers:
    """The rollout actor with a vLLM that starts its workers itself, because on CPU it cannot leave that to Ray."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def options(self, **options: Any) -> Any:
        def start(**kwargs: Any) -> Any:
            kwargs |= {"distributed_executor_backend": "mp", "bundle_indices": None}
            return self.actor.options(**options).remote(**kwargs)

        return SimpleNamespace(remote=start)


class Synced:
    """A trainer's weights, an engine of ``workers`` processes, and the transfer between them.

    The engine computes prompts in chunks, and keeps four blocks of keys and values.
    """

    def __init__(self, checkpoint: Path, bundle: Any, workers: int, temperature: float) -> None:
        import ray
        from openrlhf.trainer.ray import vllm_engine
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from openrlhf_gtpo.training.features.sampler_entropy.engine import SamplerEntropyInEngine
        from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor

        self.workers, self.temperature = workers, temperature
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        engine_args = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 5}
        fields = {"engine_args": engine_args, "features": [SamplerEntropyInEngine(temperature)]}
        actor: Any = ray.remote(type("RolloutActor", (StrictRolloutActor,), fields))
        actor = actor if workers == 1 else WithoutRayWorkers(actor)
        upstreams_actor, vllm_engine.RolloutRayActor = vllm_engine.RolloutRayActor, actor
        try:
            (self.engine,) = vllm_engine.create_vllm_engines(
                num_engines=1,
                tensor_parallel_size=workers,
                pretrain=str(checkpoint),
                seed=0,
                full_determinism=False,
                enable_prefix_caching=True,
                enforce_eager=True,
                max_model_len=PREFIX + 8,
                shared_pg=bundle,
                gpu_memory_utilization=0.1,
            )
        finally:
            vllm_engine.RolloutRayActor = upstreams_actor
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=generator)
        self.broadcaster: Any = None

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def perturbed(self, seed: int) -> dict[str, torch.Tensor]:
        """Every parameter changed by noise of its own spread."""
        generator = torch.Generator().manual_seed(seed)
        start = self.weights()
        noise = {name: torch.randn(w.shape, generator=generator) for name, w in start.items()}
        return {name: w + noise[name] * (0.5 if "norm" in name else w.std()) for name, w in start.items()}

    def send(
        self, weights: dict[str, torch.Tensor], bucket_bytes: int, transport: str = "broadcast", version: int = 0
    ) -> None:
        """Send with checksums, so that a weight that did not arrive or was not loaded raises."""
        import ray

        from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, TensorBuckets
        from openrlhf_gtpo.weight_sync.sender import ColocatedSender, WeightSender, ray_engine

        engines, device = [ray_engine(self.engine)], torch.device("cpu")
        if transport == "colocated":
            sender: Any = ColocatedSender(engines, lambda mine: [mine], device)
        else:
            if self.broadcaster is None:
                self.broadcaster = WeightSender(engines, self.workers, ray.util.get_node_ip_address(), device)
            sender = self.broadcaster
        metas = [ParameterMeta(name, tuple(w.shape)) for name, w in weights.items()]
        sender.send(TensorBuckets(metas, iter(weights.values()), bucket_bytes), True, version)

    def engine_log_probs(self) -> torch.Tensor:
        """(4, LENGTH - 1) vLLM's log-probs of the tokens."""
        import ray
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        outputs = ray.get([self.engine.generate.remote(row.tolist(), params) for row in self.tokens])
        rows = []
        for row, output in zip(self.tokens.tolist(), outputs, strict=True):
            after_the_first = zip(row[1:], output.prompt_logprobs[1:], strict=True)
            rows.append([logprobs[token].logprob for token, logprobs in after_the_first])
        return torch.tensor(rows)

    def trainer_log_probs(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """(4, LENGTH - 1) Transformers' log-probs of the tokens with ``weights`` as they are on the wire."""
        log_p = self.trainer_distributions(weights, self.tokens)
        return log_p.gather(-1, self.tokens[:, 1:, None]).squeeze(-1)

    @torch.no_grad()
    def trainer_distributions(
        self, weights: dict[str, torch.Tensor], tokens: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """(n, t - 1, V) the log-probs of every possible next token in ``tokens`` (n, t)."""
        on_the_wire = {name: w.bfloat16().float() for name, w in weights.items()}
        logits = torch.func.functional_call(self.model, on_the_wire, (tokens,)).logits
        return (logits[:, :-1] / temperature).log_softmax(-1)

    def said_by(self, weights: dict[str, torch.Tensor], tokens: torch.Tensor, start: int) -> torch.Tensor:
        """(2, n): log-probs and entropies of a row's tokens (1, ·) from ``start`` on."""
        log_p = self.trainer_distributions(weights, tokens, self.temperature)[0, start - 1 :]
        return torch.stack([log_p.gather(1, tokens[0, start:, None])[:, 0], -(log_p.exp() * log_p).sum(1)])

    def responses(self, prompt_tokens: int, **params: Any) -> list[Any]:
        """Four rows of one prompt, requested as in a rollout."""
        import ray

        return ray.get(self.ask(prompt_tokens, **params))

    def ask(self, prompt_tokens: int, **params: Any) -> Any:
        """Ray's reference to :meth:`responses`."""
        import ray
        from vllm import SamplingParams

        from openrlhf_gtpo.training.rows import Request

        prompt = "".join(chr(32 + i * i % (VOCABULARY - 2)) for i in range(prompt_tokens))
        asked = SamplingParams(temperature=self.temperature, top_k=-1, min_tokens=1, **params)
        request = Request(prompt, "", None, number=0, samples=4)
        return self.engine.sample.remote(request, asked, PREFIX + 8, [ray.put(self.tokenizer)])


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
    begin, differences = 20, []
    for delay in (0.3, 0.1, 1, 3, 0):  # seconds, until the pause falls midway
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
    else:
        pytest.fail(f"never paused midway: of {PREFIX - begin} tokens {drawn_by_old} were of the old weights")
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
            WeightSyncError, match=f"{engines_name} was not loaded, or not completely, by worker 0 of vLLM engine 0"
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


@pytest.mark.timeout(200)
def test_the_death_of_vllms_process_ends_a_transfer(synced: Synced) -> None:
    """The last test of an engine. vLLM itself never answers the calls that are under way."""
    import psutil
    from vllm.v1.engine.exceptions import EngineDeadError

    synced.send(synced.perturbed(50), 2**28)
    here = psutil.Process().children(recursive=True)
    (core,) = [process for process in here if "EngineCore" in " ".join(process.cmdline())]
    core.suspend()  # the call is under way when it dies
    threading.Timer(1, core.kill).start()
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        synced.send(synced.perturbed(51), 2**28)
    assert time.monotonic() - began < 10
