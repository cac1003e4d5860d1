"""How large a page of the token viewer is, how long it takes to make, and how fast it answers in headless Chromium.

    python3 benchmarks/viewer.py --output docs/results/viewer.json     2000 responses of 1000 tokens

Entropies are drawn as those of a trained model lie: four of five tokens are nearly certain.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages  # noqa: E402
from openrlhf_gtpo.cli import view  # noqa: E402
from openrlhf_gtpo.report.rollouts import dump_file, write_dump  # noqa: E402

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
    columns: dict[str, Any] = {
        "row": np.arange(rows),
        "group": group,
        "prompt": [f"prompt {one}" for one in group],
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
    }
    settings = {"step": 1, "policy_version": 0, "model": "drawn", "seed": 0, "estimator": "gtpo", "config": None}
    write_dump(path, settings | {"batch_rows": rows, "outcome_dtype": "float32"}, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file, page_file = dump_file(Path(folder), 1), Path(folder, "view.html")
        dump(file, args.rows, args.tokens)
        wall, cpu = time.perf_counter(), time.process_time()
        assert view.main([str(file), "--output", str(page_file)]) == 0
        made = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(page_file.as_uri())
        page.wait_for_selector("body[data-ready]")
        ready = page.evaluate("performance.now()")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        clicks = page.evaluate(CLICK)
        results = {
            "rows": args.rows,
            "tokens": args.tokens,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "dump_mib": file.stat().st_size / 2**20,
            "page_mib": page_file.stat().st_size / 2**20,
            "page": made,
            "first_paint_ms": paint,
            "ready_ms": ready,
            "click_ms": {"fastest": clicks[0], "median": clicks[10], "slowest": clicks[-1]},
        }
        browser.close()
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
