"""What entropies cost an engine: the sampler on one step's logits, and whole rollouts, with them and without in turns.

    python3 -m benchmarks.studies.sampler_entropy --model MODEL --output sampler_entropy.json

Random logits and prompts, temperature 1. For the sampler alone there are also vLLM's own log-probs of sampled tokens.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.cli import Parser

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=128, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt and each response")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()

    from openrlhf_gtpo import platform

    platform.choose()

    from vllm import LLM, SamplingParams, TokensPrompt

    from benchmarks.suite.harness import measure, median_and_range, print_table
    from openrlhf_gtpo.platform.results import write_results
    from openrlhf_gtpo.training.rollout.rollout_actor import IN_ENGINE, WORKER_EXTENSION

    load = os.getloadavg()
    on_cpu = platform.chosen_platform() == "cpu"  # which has no CUDA graphs
    options: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": on_cpu, "max_model_len": 4 * args.tokens}
    options |= {"distributed_executor_backend": IN_ENGINE}  # as in a run
    options |= {"max_num_seqs": args.rows, "gpu_memory_utilization": 0.1, "enable_prefix_caching": False}
    engine = LLM(args.model, worker_extension_cls=WORKER_EXTENSION, **options)
    vocab_size = engine.model_config.get_vocab_size()
    assert engine.collective_rpc("capture_entropy", args=(1.0,)) == [None]
    prompts = [
        TokensPrompt(prompt_token_ids=[(row * 37 + i * i) % vocab_size for i in range(args.tokens)])
        for row in range(args.rows)
    ]

    # Whole rollouts, then single steps of the sampler.
    def rollout(logprobs: int | None) -> None:
        request = {"logprobs": logprobs, "flat_logprobs": logprobs is not None}
        sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True, detokenize=False, **request)
        engine.generate(prompts, sampling, use_tqdm=False)

    sides = {"without": {"rollout": lambda: rollout(None)}, "with entropies": {"rollout": lambda: rollout(0)}}
    measured = measure(sides, args.repeat)
    samplers = measure(sampler_sides(args.rows, vocab_size, "cpu" if on_cpu else "cuda"), 3 * args.repeat, warm_up=2)
    for phase, sides_measured in (("rollout", measured), ("sampler", samplers)):
        base = sides_measured["without"]
        rows = [[name, f"{min(side.seconds[phase]):.4f}", median_and_range(side.over(base, phase), 3)]
                for name, side in sides_measured.items()]  # fmt: skip
        print_table(phase, ["", "least s", "over without, median (range)"], rows)
    results = {name: {side: m.as_json() for side, m in sides_measured.items()}
               for name, sides_measured in (("rollout", measured), ("sampler", samplers))}  # fmt: skip
    write_results(args.output, args, {"load_average": [load, os.getloadavg()], **results})


def sampler_sides(rows: int, vocab_size: int, device: str) -> dict[str, Any]:
    """One step of vLLM's V1 sampler over ``rows`` random requests."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from openrlhf_gtpo.training.features.sampler_entropy.vllm_sampler import capture

    logits = torch.randn(rows, vocab_size, dtype=torch.bfloat16, device=device) * 3
    ones = torch.ones(rows, device=device)

    def step(sampler: Any, num_logprobs: int | None) -> Any:
        metadata = SamplingMetadata(
            temperature=ones,
            all_greedy=False,
            all_random=True,
            top_p=None,
            top_k=None,
            generators={},
            max_num_logprobs=num_logprobs,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=ones,
            presence_penalties=ones,
            repetition_penalties=ones,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        return {"sampler": lambda: sampler(logits, metadata)}

    capturing = Sampler()
    capture(SimpleNamespace(sampler=capturing, vllm_config=SimpleNamespace(speculative_config=None)), 1.0)
    return {
        "without": step(Sampler(), None),
        "with entropies": step(capturing, 0),
        "vLLM's log-probs": step(Sampler(), 0),
    }


if __name__ == "__main__":
    main()
