"""Prints, for each rollout given as JSON, how many rows vLLM's own scheduler decodes in each of its steps.

This is a separate program because importing vLLM changes a process. No model runs: the scheduler is told that every
row it scheduled got a token. Cache blocks hold one token, and only a prompt's last token differs between its samples.
"""

import json
import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def make_scheduler(model: str, cache_tokens: int, most_rows: int) -> Scheduler:
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        max_num_seqs=most_rows,
        max_num_batched_tokens=100_000,
        max_model_len=4096,
    ).create_engine_config()
    config.cache_config.block_size = 1
    config.cache_config.num_gpu_blocks = cache_tokens + 1  # vLLM keeps one for itself
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(cache_tokens + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=1)


def rows_by_step(model: str, rollout: dict[str, Any]) -> dict[str, Any]:
    """``rows`` of each step, and ``computed``, the tokens of all steps together."""
    scheduler = make_scheduler(model, rollout["cache_tokens"], rollout["most_rows"])
    hasher = get_request_block_hasher(1, sha256)
    for row, length in enumerate(rollout["lengths"]):
        # The token that the first step computes is counted with the response, as `decode` does.
        prompt = [row // rollout["samples"]] * rollout["prompt"] + [100_000 + row]
        wanted = SamplingParams(max_tokens=length, ignore_eos=True)
        scheduler.add_request(Request(str(row), prompt, wanted, None, block_hasher=hasher))
    steps, computed = [], 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        rows = list(output.num_scheduled_tokens)
        steps.append(len(rows))
        computed += output.total_num_scheduled_tokens
        tokens = [[200_000 + len(steps) * len(rollout["lengths"]) + i] for i in range(len(rows))]
        index = {row: i for i, row in enumerate(rows)}
        scheduler.update_from_output(output, ModelRunnerOutput(rows, index, sampled_token_ids=tokens))
    return {"rows": steps, "computed": computed}


def main() -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=4096)
    config.architectures = ["LlamaForCausalLM"]
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        config.save_pretrained(model)
        found = [rows_by_step(model, rollout) for rollout in json.loads(sys.argv[1])]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
