"""Samples responses of the quickstart's model to the quickstart's questions, with rewards: input for `benchmark fp8`.

    python3 -m benchmarks.studies.sample_rollouts --model MODEL --data DATA/train.jsonl \
        --output rollouts.jsonl --prompts 32 --samples 8

DATA is from `python3 -m openrlhf_gtpo.cli.prepare task`. vLLM samples at temperature 1; rewards are reasoning-gym's.
"""

import json
import os
from pathlib import Path

from openrlhf_gtpo.cli import Parser

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    from openrlhf_gtpo import platform

    platform.choose()

    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from openrlhf_gtpo.tasks.reasoning_gym_reward import reward_func

    rows = [json.loads(line) for line in args.data.read_text().splitlines()][: args.prompts]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.apply_chat_template(row["input"], tokenize=False, add_generation_prompt=True) for row in rows]
    engine = LLM(args.model, dtype="bfloat16", max_model_len=512, enforce_eager=True, seed=args.seed)
    sampling = SamplingParams(n=args.samples, temperature=1.0, max_tokens=args.max_tokens)
    with args.output.open("w", encoding="utf-8") as file:
        for group, (row, prompt, answer) in enumerate(
            zip(rows, prompts, engine.generate(prompts, sampling), strict=True)
        ):
            for response in answer.outputs:
                text = tokenizer.decode(response.token_ids)  # including the token that ends it
                score = reward_func([prompt + text], [prompt], [row["scorer_label"]])["rewards"]
                line = {"prompt": prompt, "response": text, "group": group, "reward": score}
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
