"""The cost of entropies in an engine: the sampler on one step's logits, and whole rollouts with and without entropies,
in turn, returned at the end as in a run and token by token as in vLLM.

    python3 -m benchmarks.studies.sampler_entropy --model MODEL --output sampler_entropy.json

Random logits and prompts, temperature 1. The sampler alone also runs with vLLM's own log-probs of sampled tokens.
"""

import asyncio
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.cli import Parser

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # as in OpenRLHF's engines


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=128, help="requests of a rollout, 256 of them at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt and each response")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()

    from openrlhf_gtpo import platform

    platform.choose()

    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils import random_uuid

    from benchmarks.suite.harness import measure, median_and_range, print_table
    from benchmarks.suite.results import write_results
    from openrlhf_gtpo.training.rollout.answers import hold, values_of
    from openrlhf_gtpo.training.rollout.rollout_actor import IN_ENGINE, SCHEDULER, WORKER_EXTENSION

    load = os.getloadavg()
    on_cpu = platform.chosen_platform() == "cpu"  # a CPU has no CUDA graphs
    options: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": on_cpu, "max_model_len": 4 * args.tokens}
    options |= {"distributed_executor_backend": IN_ENGINE, "disable_log_stats": True}  # as in a run
    options |= {"max_num_seqs": min(args.rows, 256), "gpu_memory_utilization": 0.1, "enable_prefix_caching": False}
    options |= {"worker_extension_cls": WORKER_EXTENSION, "scheduler_cls": SCHEDULER, "seed": 1}
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(args.model, **options))
        assert await engine.collective_rpc("capture_entropy", args=(1.0,)) == [None]
        return engine

    async def end(engine: Any) -> None:
        engine.shutdown()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    engine = loop.run_until_complete(start())
    vocab_size = engine.model_config.get_vocab_size()
    prompts = [
        TokensPrompt(prompt_token_ids=[(row * 37 + i * i) % vocab_size for i in range(args.tokens)])
        for row in range(args.rows)
    ]

    async def ask(prompt: Any, with_values: bool, held: bool) -> None:
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if with_values:
            params.logprobs, params.flat_logprobs = 0, True
        if held:
            hold(params)
        async for output in engine.generate(prompt, params, request_id=random_uuid()):
            [answer] = output.outputs
        assert len(answer.token_ids) == args.tokens == (len(values_of(answer)) or args.tokens)

    client: dict[str, list[float]] = {}  # processor seconds of this process, the client, in each rollout

    async def ask_all(*how: bool) -> None:
        await asyncio.gather(*(ask(prompt, *how) for prompt in prompts))

    def rollout(name: str, *how: bool) -> None:
        began = time.process_time()
        loop.run_until_complete(ask_all(*how))
        client.setdefault(name, []).append(time.process_time() - began)

    ways = {
        "without": (False, True),
        "with entropies": (True, True),
        "without, token by token": (False, False),
        "with entropies, token by token": (True, False),
    }
    sides = {name: {"rollout": partial(rollout, name, *way)} for name, way in ways.items()}
    measured = measure(sides, args.repeat)
    for name, side in measured.items():
        side.about["client_seconds"] = client[name][-args.repeat :]
    loop.run_until_complete(end(engine))
    samplers = measure(sampler_sides(args.rows, vocab_size, "cpu" if on_cpu else "cuda"), 3 * args.repeat, warm_up=2)
    for phase, sides_measured in (("rollout", measured), ("sampler", samplers)):
        base = sides_measured["without"]
        rows = [[name, f"{min(side.seconds[phase]):.4f}", median_and_range(side.over(base, phase), 3)]
                for name, side in sides_measured.items()]  # fmt: skip
        print_table(phase, ["", "least s", "relative to without, median (range)"], rows)
    tokens = args.rows * args.tokens
    of_client = [[name, median_and_range([1e6 * seconds / tokens for seconds in side.about["client_seconds"]], 1)]
                 for name, side in measured.items()]  # fmt: skip
    print_table("client's processor", ["", "us a token, median (range)"], of_client)
    results = {name: {side: m.as_json() for side, m in sides_measured.items()}
               for name, sides_measured in (("rollout", measured), ("sampler", samplers))}  # fmt: skip
    write_results(args.output, args, {"load_average": [load, os.getloadavg()], **results})


def sampler_sides(rows: int, vocab_size: int, device: str) -> dict[str, Any]:
    """Set up one step of vLLM's V1 sampler over ``rows`` random requests."""
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
    capture(SimpleNamespace(sampler=capturing, vllm_config=SimpleNamespace(speculative_config=None)), 1.0, lambda: 0)
    return {
        "without": step(Sampler(), None),
        "with entropies": step(capturing, 0),
        "vLLM's log-probs": step(Sampler(), 0),
    }


if __name__ == "__main__":
    main()
