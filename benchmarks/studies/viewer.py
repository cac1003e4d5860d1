"""Measures a page of the token viewer: its size, the time to make it, and its response times in headless Chromium.

    python3 -m benchmarks.studies.viewer --output docs/results/viewer.json     2000 responses of 1000 tokens
    python3 -m benchmarks.studies.viewer --dump MODEL --output docs/results/dump.json

The second measures the cost of a dump in a step: 64 responses of 1000 tokens, written by the trainer's own dumper,
against one forward and backward pass of MODEL over them. A step also samples, computes old log-probs and updates
weights, so the real share is smaller. --train-rows of the 64 responses are trained on, and the time is scaled up.

Entropies are distributed as in a trained model: four of five tokens are nearly certain.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from playwright.sync_api import sync_playwright

from benchmarks.suite.results import write_results
from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from openrlhf_gtpo.cli import Parser, view
from openrlhf_gtpo.report.rollouts import dump_file, write_dump

CLICK = """async () => {
    const times = [];
    for (let row = 1; row < 21; row++) {
        const start = performance.now();
        document.querySelectorAll("#list button")[row].click();
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        times.push(performance.now() - start);
    }
    return times.sort((a, b) => a - b);
}"""


def dump(path: Path, rows: int, tokens: int, samples: int = 8) -> None:
    random = np.random.default_rng(0)
    certain = random.random((rows, tokens)) < 0.8
    entropy = np.where(certain, random.exponential(0.05, (rows, tokens)), random.gamma(2, 0.6, (rows, tokens)))
    entropy = entropy.astype(np.float32)
    outcome, group = (random.random(rows) < 0.5).astype(float), np.arange(rows) // samples
    words = np.array([f" word{i}" for i in range(8000)], object)
    ids = np.minimum(random.zipf(1.3, (rows, tokens)), len(words)) - 1
    mask = np.ones((rows, tokens), bool)
    advantages = gtpo_advantages(
        *map(torch.from_numpy, (entropy, mask, outcome.astype(np.float32), group)), GTPOConfig()
    )
    ratio = np.exp(0.2 * entropy * random.normal(size=entropy.shape)).astype(np.float32)
    columns: dict[str, Any] = {
        "row": np.arange(rows),
        "group": group,
        "prompt": [f"prompt {number}" for number in group],
        "outcome": outcome,
        "length_penalty": np.zeros(rows),
        "truncated": np.zeros(rows, bool),
        "prompt_tokens": [[0]] * rows,
        "tokens": list(ids.astype(np.int32)),
        "pieces": list(words[ids]),
        "mask": list(mask),
        "log_probs": list((-entropy * random.exponential(1, entropy.shape)).astype(np.float32)),
        "rollout_log_probs": None,
        "entropy": list(entropy),
        "advantages": list(advantages.numpy()),
        "ratio": list(ratio),
        "clipped": list(abs(ratio - 1) > 0.2),
    }
    settings = {"step": 1, "policy_version": 0, "model": "drawn", "seed": 0, "estimator": "gtpo", "config": None}
    write_dump(path, settings | {"batch_rows": rows, "outcome_dtype": "float32"}, columns)


def dump_cost(name: str, train_rows: int, repeat: int, rows: int = 64, tokens: int = 1000) -> dict[str, Any]:
    """Measure the seconds of writing a dump and of training on it, in turn, and the medians of their ratios."""
    from openrlhf.trainer.ppo_utils.experience import Experience
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openrlhf_gtpo.token_values import TokenValues
    from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
    from openrlhf_gtpo.training.features.dumps import dumper as dumps
    from openrlhf_gtpo.training.rows import Row
    from openrlhf_gtpo.training.run import parse

    # A dumper with a synthetic rollout, ratios and run, whose writes are timed in their own thread.
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).float()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, tokenizer.vocab_size, (rows, tokens + 1), generator=draw)
    drawn = torch.rand(rows, tokens, generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--actor.model_name_or_path", name, "--vllm.num_engines", "1", "--reward.remote_url", "r.py"]
        flags += ["--rollout.n_samples_per_prompt", "8", "--algo.advantage.estimator", "gtpo"]
        args = parse([*flags, "--logger.dump_rollouts", "1", "--ckpt.path", folder])
        dumper = dumps.RolloutDumper(args)
        write, cpu = dumper._write, [0.0]

        def timed(*arguments: Any) -> None:
            began = time.thread_time()
            write(*arguments)
            cpu[0] = time.thread_time() - began

        dumper._write = timed  # type: ignore
        measured: dict[str, list[float]] = {"call_s": [], "thread_cpu_s": [], "train_s": [], "train_cpu_s": []}
        mask = np.arange(tokens + 1) > 0
        sampled = [Row("prompt", None, row // 8, ids[row].numpy(), mask, None, 1.0, None) for row in range(rows)]
        ratios = {row: (drawn[row].numpy(), drawn[row].numpy() > 0.5) for row in range(rows)}
        rank = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: ratios))
        dumps.ray = SimpleNamespace(get=lambda result: result)  # type: ignore[assignment]
        group = SimpleNamespace(_actor_handlers=[rank])
        run = SimpleNamespace(tokenizer=tokenizer, max_steps=repeat, step=0, models=SimpleNamespace(actor=group))
        dumper.begin(run)
        # In turns: dump a step, and train on a few of its rows.
        for step in range(1, repeat + 1):
            ones = torch.ones(rows)
            experience = Experience(
                sequences=ids, attention_mask=torch.ones_like(ids), action_mask=torch.ones_like(drawn),
                action_log_probs=-drawn, rollout_log_probs=-drawn, advantages=drawn, rewards=ones,
                truncated=ones.bool(), index=list(range(rows)), kl=drawn, prompts=["prompt"] * rows,
            )  # fmt: skip
            batch = RolloutBatch.gather([experience], [TokenValues(-drawn, drawn)], sampled, 8)
            began = time.perf_counter()
            run.step = step - 1
            dumper.on_batch(batch, [experience])
            measured["call_s"].append(time.perf_counter() - began)
            dumper.on_step(step, {})
            dumper.end()
            measured["thread_cpu_s"].append(cpu[0])
            began, began_cpu = time.perf_counter(), time.process_time()
            for row in ids[:train_rows]:
                model(row[None], labels=row[None]).loss.backward()
            measured["train_s"].append((time.perf_counter() - began) * rows / train_rows)
            measured["train_cpu_s"].append((time.process_time() - began_cpu) * rows / train_rows)
        size = dump_file(Path(folder, "rollouts"), repeat).stat().st_size / 2**20
    shares = {
        "of_the_trainers_thread": np.divide(measured["call_s"], measured["train_s"]),
        "of_cpu": np.divide(measured["thread_cpu_s"], measured["train_cpu_s"]),
    }
    return {
        "rows": rows, "tokens": tokens, "load_average": os.getloadavg()[0], "dump_mib": size, "seconds": measured,
        "share": {name: {"median": float(np.median(part)), "largest": max(part)} for name, part in shares.items()},
    }  # fmt: skip


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dump", metavar="MODEL", help="measure writing a dump, and not the page")
    parser.add_argument("--train-rows", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.dump:
        write_results(args.output, args, dump_cost(args.dump, args.train_rows, args.repeat))
        print(args.output.read_text(), end="")
        return
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file, page_file = dump_file(Path(folder), 1), Path(folder, "view.html")
        dump(file, args.rows, args.tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        assert view.main([str(file), "--output", str(page_file)]) == 0
        page_cost = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector("body[data-ready]")
        ready = page.evaluate("performance.now()")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        clicks = page.evaluate(CLICK)
        results = {
            "load_average": os.getloadavg()[0],
            "dump_mib": file.stat().st_size / 2**20,
            "page_mib": page_file.stat().st_size / 2**20,
            "page": page_cost,
            "first_paint_ms": paint,
            "ready_ms": ready,
            "click_ms": {"fastest": clicks[0], "median": clicks[10], "slowest": clicks[-1]},
        }
        browser.close()
    write_results(args.output, args, results)
    print(args.output.read_text(), end="")


if __name__ == "__main__":
    main()
