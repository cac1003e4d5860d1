"""GTPO in TRL: a GRPOTrainer whose advantages come from this package, and a program that trains with it.

    pip install trl==1.16.0 .      # in a clone of this project; needs neither OpenRLHF nor vLLM nor Ray
    python3 examples/elsewhere/trl_gtpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --output runs/trl --steps 5

TRL samples, rewards, clips and steps. This code takes the rows' rewards, before TRL normalizes them, and the entropies
of the sampling policy. It returns (B, T) advantages, which TRL's loss accepts.
"""

import argparse
import re
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from openrlhf_gtpo.algorithms import ESTIMATORS


class EntropyCreditTrainer(GRPOTrainer):
    """TRL's trainer with a token-level estimator of ``openrlhf_gtpo.algorithms``.

    Args:
        estimator: the estimator's name, such as "gtpo".
        credit: its settings, such as ``GTPOConfig(alpha2=0.2)``; by default the estimator's.
        args: as for TRL. GTPO uses ``loss_type="dapo"``, a mean over the step's tokens, ``epsilon=0.2`` and
            ``epsilon_high=0.28``, and rewards of at least ``credit.success_threshold`` for right responses.

    Raises:
        ValueError: the estimator or the ratio is sequence-level.
    """

    def __init__(self, *args: Any, estimator: str = "gtpo", credit: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.estimator = ESTIMATORS[estimator]
        self.credit = self.estimator.config() if credit is None else credit
        if self.estimator.level != "token" or self.importance_sampling_level != "token":
            raise ValueError(f"{estimator} with a ratio per {self.importance_sampling_level}: both must be per token.")

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = rewards  # (N, functions), all processes in order; NaN where a function gives none
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Add advantages to this process's rows before TRL shuffles them and cuts them into micro-batches. Later,
        groups are no longer complete."""
        batch = super()._generate_and_score_completions(inputs)
        if "pixel_values" in batch:
            raise ValueError("This example supports only prompts without images.")
        mask = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            mask = mask & batch["tool_mask"].bool()
        training = self.model.training
        with torch.no_grad():
            _, entropy, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                mask.shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )

        # All rows, in the order of the processes. Groups are adjacent, but may span two processes.
        entropy, everyone = (
            gather(self.accelerator.pad_across_processes(values, dim=1)) for values in (entropy, mask.long())
        )
        scored = ~self._rewards.isnan().all(dim=1)
        outcome = (self._rewards * self.reward_weights.to(self._rewards)).nansum(dim=1)
        samples = self.num_generations if training else self.num_generations_eval
        advantages = self.estimator.advantages(
            entropy,
            everyone.bool() & scored[:, None],
            outcome,
            torch.arange(len(outcome), device=outcome.device) // samples,
            self.credit,
        )
        first = self.accelerator.process_index * len(mask)
        batch["advantages"] = advantages[first : first + len(mask), : mask.shape[1]]
        return batch


def product_prompts() -> list[dict[str, Any]]:
    """Make prompts of one-digit products, with a worked example."""
    shown = [{"role": "user", "content": "2 * 3"}, {"role": "assistant", "content": "The result is 6."}]
    questions = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    return [{"prompt": [*shown, {"role": "user", "content": f"{a} * {b}"}], "answer": a * b} for a, b in questions]


def is_right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """Return 1 where the last number of a response is the answer, otherwise 0."""
    numbers = [re.findall(r"\d+", completion[0]["content"])[-1:] for completion in completions]
    return [float(found == [str(right)]) for found, right in zip(numbers, answer, strict=True)]


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="of each step, with 8 responses each")
    parser.add_argument(
        "--estimator", default="gtpo", choices=[n for n, e in ESTIMATORS.items() if e.level == "token"]
    )
    args = parser.parse_args()
    config = GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=args.prompts,
        num_generations=8,
        max_completion_length=24,
        learning_rate=2e-5,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    EntropyCreditTrainer(
        args.model,
        reward_funcs=is_right,
        args=config,
        train_dataset=Dataset.from_list(product_prompts()),
        estimator=args.estimator,
    ).train()


if __name__ == "__main__":
    main()
