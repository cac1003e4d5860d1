"""One optimizer step of a tiny model with the TRL adapter, in however many processes; what its micro-batches carried.

python3 -m torch.distributed.run --standalone --nproc-per-node 2 tests/support/trl_program.py DIR
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig
from trl_gtpo import EntropyCreditTrainer

DIRECTORY = Path(sys.argv[1])
WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(18))]
LIMIT = 6
SAMPLES = 4 if os.environ["WORLD_SIZE"] == "2" else 3  # of the 6 rows that a process has


def is_even(completions: list[str], **_: Any) -> list[float]:
    """1 for responses with an even number of words."""
    return [float(len(completion.split()) % 2 == 0) for completion in completions]


class Recording(EntropyCreditTrainer):
    """Writes down the rows of each micro-batch, with entropies of one plain forward per row."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with (DIRECTORY / f"rows-{self.accelerator.process_index}.jsonl").open("a") as file:
            for i, row in enumerate(inputs["completion_mask"].bool()):
                prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
                completion = inputs["completion_ids"][i][row]
                with torch.no_grad():
                    logits = self.model(input_ids=torch.cat([prompt, completion])[None]).logits[0]
                log_probs = (logits / self.temperature).double().log_softmax(-1)[len(prompt) - 1 : -1]
                text = self.processing_class.decode(completion, skip_special_tokens=True)
                record = {
                    "rank": self.accelerator.process_index,
                    "prompt": self.processing_class.decode(prompt),
                    "reward": is_even([text])[0],
                    "entropy": (-(log_probs.exp() * log_probs).sum(-1)).tolist(),
                    "advantages": inputs["advantages"][i][row].tolist(),
                }
                file.write(json.dumps(record) + "\n")
        return super().compute_loss(model, inputs, *args, **kwargs)


def main() -> None:
    torch.manual_seed(1)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config).double()
    before = model.lm_head.weight.detach().clone()
    arguments = GRPOConfig(
        output_dir=str(DIRECTORY / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_generations=SAMPLES,
        max_completion_length=LIMIT,
        learning_rate=1e-3,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    prompts = Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"[: 2 + 3 * (i % 3)]} for i in range(9)])
    trainer = Recording(model, reward_funcs=is_even, args=arguments, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        changed = (trainer.accelerator.unwrap_model(trainer.model).lm_head.weight - before).abs().max().item()
        (DIRECTORY / "changed.json").write_text(json.dumps(changed))


if __name__ == "__main__":
    main()
