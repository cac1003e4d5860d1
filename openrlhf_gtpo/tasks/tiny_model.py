"""A tiny Llama or Qwen3-MoE for smoke tests, warm-started to solve a fair part of the small `products` task.

Reinforcement learning needs groups that are neither all right nor all wrong. Random weights do not give such groups. A
few seconds of supervised training do, on answers of which only a part is right: sampled at temperature 1, the model
then answers every question correctly about that often.
"""

import json
import random
from pathlib import Path
from typing import Any

from openrlhf_gtpo.tasks.build_once import build_once
from openrlhf_gtpo.tasks.reasoning_gym_data import SMALL_CONFIGS, PromptForm, draw_entries

MODEL_VERSION = 1
TASK, QUESTIONS = "products", 100  # PRESETS["smoke"]: all of SMALL_CONFIGS["products"]
CORRECT_FRACTION = 0.45  # share of right answers in the warm start
ANSWER_FORMS = ("{answer}", "{expression} = {answer}")  # two lengths, so that responses of a group differ in length
STEPS, CLEAN_STEPS, BATCH_SIZE, LEARNING_RATE = 300, 200, 64, 3e-3
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(output_dir: str | Path, seed: int = 1, mixture: bool = False) -> Path:
    """Write the checkpoint (fp32 weights in safetensors, tokenizer with chat template) and return its directory.

    2 layers, hidden size 128, 4 attention heads and 2 KV heads of dimension 32 (the smallest that vLLM's CPU attention
    accepts), a vocabulary of 384 tokens, one token per digit. A `mixture` has 4 layers of 8 experts each, and a token
    goes to 2 of them. Takes about 15 s the first time, a mixture 30 s. The same seed gives the same weights on the
    same kind of machine.

    Raises:
        ValueError: `output_dir` has other files.
    """
    recipe = {"model": "tiny-moe" if mixture else "tiny", "seed": seed, "model_version": MODEL_VERSION}
    return build_once(output_dir, recipe, lambda directory: _make(seed, directory, mixture))


def _make(seed: int, directory: Path, mixture: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    entries = draw_entries(TASK, QUESTIONS, seed, SMALL_CONFIGS[TASK])
    tokenizer = _tokenizer(entries)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if mixture:
        shape |= {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        shape |= {"hidden_size": 64, "norm_topk_prob": True, "tie_word_embeddings": False}  # as in Qwen3-30B-A3B
    # One thread: such small products do not get faster with a second one, and get much slower if cores are shared (12
    # s become 180 s). One thread also gives the same weights at any OMP_NUM_THREADS.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = (
                Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)) if mixture else LlamaForCausalLM(LlamaConfig(**shape))
            )
            _warm_start(model, tokenizer, entries, random.Random(seed))
    finally:
        torch.set_num_threads(threads)
    model.generation_config._from_model_config = False
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    spell_for_transformers_4(directory)


def spell_for_transformers_4(directory: Path) -> None:
    """Rename fields in a folder saved by Transformers 5 so that Transformers 4 reads it too. Otherwise 4 would assume
    a base of 10,000 and 128 experts, and reject the tokenizer's class."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    path.write_text(json.dumps(config, indent=2) + "\n")
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n")


def _tokenizer(entries: list[dict[str, Any]]) -> Any:
    """Train a byte-level BPE on the task's own texts, with one token per digit as in SmolLM2.

    Merges may cross words, so that a prompt has few tokens besides its numbers and the warm start takes seconds.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [PromptForm().user_text(entry) for entry in entries]
    backend.train_from_iterator([*texts, "system\n", "user\n", "assistant\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _warm_start(model: Any, tokenizer: Any, entries: list[dict[str, Any]], rng: random.Random) -> None:
    import torch

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    chats = [[{"role": "user", "content": PromptForm().user_text(entry)}] for entry in entries]
    prompts = [ids(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    answers = [entry["answer"] for entry in entries]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    # Each batch draws questions. After the first steps, a part of the answers belongs to other questions.
    for step in range(STEPS):
        rows, labels = [], []
        for index in rng.choices(range(len(entries)), k=BATCH_SIZE):
            answer = answers[index] if step < CLEAN_STEPS or rng.random() < CORRECT_FRACTION else rng.choice(answers)
            text = rng.choice(ANSWER_FORMS).format(answer=answer, expression=entries[index]["metadata"]["expression"])
            response = ids(text + EOS)
            rows.append(prompts[index] + response)
            labels.append([-100] * len(prompts[index]) + response)
        width = max(map(len, rows))
        # Padding on the right needs no attention mask, because no label depends on it.
        input_ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
        loss = model(input_ids=input_ids, labels=targets, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
