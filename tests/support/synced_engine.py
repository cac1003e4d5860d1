"""An engine of real Ray and vLLM, a trainer's weights, and the transfer between them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VOCABULARY, LENGTH = 96, 40
PREFIX = 200  # more than a block of vLLM's cache, 128 tokens on CPU


def save_checkpoint(directory: Path, tied: bool = False, experts: int = 0) -> Path:
    """A random Llama (head dimension 32, the least that vLLM's CPU attention supports), or a Qwen3-MoE with so many
    ``experts``, and a tokenizer for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**shape)) if not experts else None
    if experts:
        shape |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        shape |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).bfloat16()
    model.save_pretrained(directory)
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
