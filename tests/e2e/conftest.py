"""Runs the trainer through the real stack on a tiny model; the tests look at what a run leaves behind."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import prepare

ROOT = Path(__file__).resolve().parents[2]
REWARD = ROOT / "openrlhf_gtpo" / "tasks" / "reasoning_gym_reward.py"


@dataclass
class Finished:
    """A training run that has ended."""

    code: int
    log: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of training and evaluation, from all starts of a resumed run."""
        entries = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [entry for entry in entries if entry["kind"] != "run"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [entry for entry in self.metrics if entry["kind"] == "train"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task") / "products"
    assert (
        prepare.main(["task", "--task", "products", "--train-size", "32", "--eval-size", "8", "--output", str(folder)])
        == 0
    )
    return folder


@pytest.fixture
def trainer_argv(tiny_model: Path, task: Path, tmp_path: Path) -> list[str]:
    """Two steps of four prompts with four responses each."""
    flags = {
        "--actor.model_name_or_path": tiny_model,
        "--actor.num_gpus_per_node": 1,
        "--actor.adam.lr": 1e-3,
        "--actor.lr_warmup_ratio": 0,
        "--algo.kl.init_coef": 0,
        "--vllm.num_engines": 1,
        "--reward.remote_url": REWARD,
        "--data.prompt_dataset": task / "train.jsonl",
        "--data.label_key": "scorer_label",
        "--data.max_samples": 8,
        "--data.max_len": 64,
        "--rollout.batch_size": 4,
        "--rollout.n_samples_per_prompt": 4,
        "--rollout.max_new_tokens": 8,
        "--rollout.micro_batch_size": 8,
        "--train.batch_size": 16,
        "--train.micro_batch_size": 8,
        "--ckpt.output_dir": tmp_path / "model",
        "--ckpt.path": tmp_path / "checkpoints",
        "--logger.metrics_path": tmp_path / "metrics.jsonl",
    }
    return [*(str(word) for pair in flags.items() for word in pair), "--data.apply_chat_template"]


def finish(argv: list[str], folder: Path, timeout: float = 800, command: list[str] | None = None) -> Finished:
    """Train with ``argv`` in its own process and return what it leaves behind. The limit is for a run that hangs."""
    command = command or [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray"]
    ended = subprocess.run([*command, *argv], cwd=folder, capture_output=True, text=True, timeout=timeout)
    return Finished(ended.returncode, ended.stdout + ended.stderr, folder)
