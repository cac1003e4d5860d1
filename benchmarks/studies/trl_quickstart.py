"""The quickstart's task in TRL: a stock GRPOTrainer, evaluated after each step until it reaches a held-out reward.

``time_to_reward.py`` starts this with TRL in PYTHONPATH, and reads the metrics rows that it writes.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.studies.quickstart_runs import HELD_OUT
from openrlhf_gtpo.report import names
from openrlhf_gtpo.tasks.reasoning_gym_reward import reward_func

NEW_TOKENS, SAMPLES_HELD_OUT = 32, 16


def score(texts: list[str], labels: list[str]) -> list[float]:
    """Score responses with the quickstart's scorer."""
    pairs = zip(texts, labels, strict=True)
    return [reward_func([text], [""], [label])["rewards"] for text, label in pairs]


class Recorder(TrainerCallback):
    """Writes the start of the first step, each step's time, and the held-out reward before the first and after each.

    Fields:
        until: held-out reward at which training stops.
    """

    def __init__(self, path: Path, held_out: list[dict[str, Any]], tokenizer: Any, until: float) -> None:
        self.path, self.held_out, self.tokenizer, self.until = path, held_out, tokenizer, until
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._write(names.KIND_RUN, 0)
        self._evaluate(0, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._write(names.KIND_TRAIN, state.global_step, **{names.TIMING_STEP_WALL: time.perf_counter() - self.began})
        control.should_training_stop |= self._evaluate(state.global_step, model) >= self.until

    @torch.no_grad()
    def _evaluate(self, step: int, model: Any) -> float:
        model.eval()
        rewards = []
        for start in range(0, len(self.held_out), 8):
            rows = [row for row in self.held_out[start : start + 8] for _ in range(SAMPLES_HELD_OUT)]
            texts = [
                self.tokenizer.apply_chat_template(r["input"], tokenize=False, add_generation_prompt=True)
                for r in rows
            ]
            given = self.tokenizer(
                texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
            )
            tokens = model.generate(**given, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS)
            responses = self.tokenizer.batch_decode(tokens[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
            rewards += score(responses, [row["scorer_label"] for row in rows])
        model.train()
        reward = sum(rewards) / len(rewards)
        self._write(names.KIND_EVAL, step, **{HELD_OUT: reward})
        return reward

    def _write(self, kind: str, step: int, **numbers: float) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "time": time.time(), **numbers}) + "\n")


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="the quickstart's train.jsonl and eval.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", type=float, required=True)
    args = parser.parse_args()
    rows, held_out = (
        [json.loads(line) for line in (args.data / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "eval")
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    config = GRPOConfig(
        output_dir=str(args.output / "trl"),
        max_steps=args.steps,
        seed=args.seed,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,  # 16 prompts x 8 responses, one optimizer step
        num_generations=8,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        learning_rate=2e-5,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        adam_beta2=0.95,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        bf16="avx512_bf16" in Path("/proc/cpuinfo").read_text(),  # float32 is faster elsewhere
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    GRPOTrainer(
        args.model,
        reward_funcs=lambda completions, scorer_label, **_: score(
            [c[0]["content"] for c in completions], scorer_label
        ),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": r["input"], "scorer_label": r["scorer_label"]} for r in rows]),
        processing_class=tokenizer,
        callbacks=[Recorder(args.output / "metrics.jsonl", held_out, tokenizer, args.until)],
    ).train()


if __name__ == "__main__":
    main()
