"""Runs with many features at once, through Ray and vLLM, that are killed and go on: whatever else a run has, each step
trains on whole groups that the filter lets through, each prompt is trained on once, a row's actions are what was
sampled, and the exported model has what was trained. The list of pairs is ``tests/support/crossings.py``.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.report.rollouts import RolloutDump, find_dumps, read_dump
from tests.e2e.conftest import finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS, GROUP, FIXED = 16, 4, [5, 6, 7]
# Two turns, of a length that depends on the place in the group, with an observation between them. The first response
# to a prompt fails, and every fourth prompt is always answered alike, which the filter drops.
AGENT = f"""
from collections import Counter

from openrlhf.utils.agent import AgentExecutorBase

asked = Counter()


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        place = asked[prompt] % {GROUP}
        asked[prompt] += 1
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        log_probs, actions = [0.0] * len(tokens), []
        for turn in range(2):
            params = sampling_params.clone()
            params.max_tokens, params.ignore_eos = 4 + 6 * place, True
            answer = (await llm_engine.generate(tokens, params)).outputs[0]
            actions.append((len(tokens), len(tokens) + len(answer.token_ids)))
            tokens = [*tokens, *answer.token_ids]
            log_probs += [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs, strict=True)]
            if turn == 0:
                tokens, log_probs = [*tokens, *{FIXED}], log_probs + [0.0] * {len(FIXED)}
        reward = float(place > 0 and int(label) % 4 > 0)
        return {{
            "prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": actions,
            "rollout_log_probs": log_probs, "reward": reward, "scores": reward, "truncated": False, "extra_logs": {{}},
        }}
"""
ASYNCHRONOUS = ["--train.async_enable", "--algo.advantage.is_correction_level", "token"]
ASYNCHRONOUS += ["--rollout.entropy_audit_steps", "0"]  # which would have the engines wait for the trainer
IN_FLIGHT = [*ASYNCHRONOUS, "--train.partial_rollout_enable"]
ADAPTERS = ["--ds.lora.rank", "4", "--actor.adam.lr", "1e-3"]
ADAPTERS += ["--ds.lora.target_modules", "q_proj", "k_proj", "v_proj", "o_proj"]
REFERENCE = ["--algo.kl.init_coef", "0.01", "--algo.kl.use_loss"]  # the actor without adapters
MEGATRON = ["--actor.backend", "megatron", "--train.max_tokens_per_gpu", "512"]
# Each has turns, the filter, a kill, a resume and an export besides.
RUNS = {
    "deepspeed, asynchronous, adapters, mixture, guide": [*ASYNCHRONOUS, *ADAPTERS],
    "deepspeed, in flight, adapters, mixture": [*IN_FLIGHT, *ADAPTERS],
    "megatron, asynchronous, mixture, guide": [*MEGATRON, *ASYNCHRONOUS],
    "megatron, in flight, mixture": [*MEGATRON, *IN_FLIGHT],
    "megatron, in flight, adapters": [*MEGATRON, *IN_FLIGHT, *ADAPTERS, *REFERENCE],
}


REPLAYED = ("deepspeed, in flight, adapters, mixture", "megatron, in flight, adapters")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    file.write_text("".join(f'{{"input": "question {n} ?", "label": "{n}"}}\n' for n in range(PROMPTS)))
    return file


def steps(folder: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return [row for row in read_runs(folder / "metrics.jsonl")[-1] if row["kind"] == names.KIND_TRAIN]
    return []


def killed(argv: Sequence[str], folder: Path, after: int) -> None:
    """Train, and kill all processes of the run once it has made ``after`` steps."""
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv]
        run = psutil.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    while len(steps(folder)) < after:
        assert run.poll() is None, (folder / "log").read_text()[-4000:]
        time.sleep(0.1)
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()


def prompts_of(dump: RolloutDump, name: str) -> list[str]:
    """The prompts of a dump's groups, all of whose rows are as they should be in the run ``name``."""
    columns, found = dump.columns, []
    for group in np.unique(columns["group"]):
        rows = np.flatnonzero(columns["group"] == group)
        assert len(rows) == GROUP and len({columns["prompt"][row] for row in rows}) == 1
        guided = [bool(columns["guided"][row]) for row in rows] if "guide" in name else [False] * GROUP
        assert guided == [False] * (GROUP - 1) + ["guide" in name]
        assert [columns["outcome"][row] for row in rows] == [0, 1, 1, 0 if guided[-1] else 1]
        found.append(columns["prompt"][rows[0]])
        for row in rows:
            tokens, mask = (np.array(columns[part].rows()[row]) for part in ("tokens", "mask"))
            assert tokens[~mask].tolist() == FIXED, "the observation alone is no action"
            assert len(mask) in {2 * (4 + 6 * place) + len(FIXED) for place in range(GROUP)}
            if "guide" not in name:  # whose rows are of no version
                assert {*np.array(columns["versions"].rows()[row])[mask]} <= {dump.step - 1, dump.step - 2}
    if name.startswith("megatron") and "mixture" in name:
        assert dump.settings["routing"]["flips"]
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_many_features_keeps_to_each(
    name: str, trainer_argv: list[str], data: Path, tiny_model: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    base = tiny_mixture if "mixture" in name else tiny_model
    (tmp_path / "agent.py").write_text(AGENT)
    argv = [*trainer_argv, "--algo.advantage.estimator", "gtpo", "--actor.model_name_or_path", str(base)]
    argv += ["--data.prompt_dataset", str(data), "--data.label_key", "label", "--data.max_samples", str(PROMPTS)]
    argv += ["--train.agent_func_path", "agent.py", "--algo.dynamic_filtering_enable", "--data.max_len", "128"]
    argv += ["--rollout.entropy", "sampler", "--vllm.sync_checksum", *RUNS[name]]
    if "guide" in name:
        argv += ["--algo.guide.model_name_or_path", str(base), "--algo.guide.fraction", str(1 / GROUP)]
    sampled = [*argv, "--logger.dump_rollouts", "1", "--ckpt.save_steps", "1", "--ckpt.load_enable"]
    killed(sampled, tmp_path, after=2)
    run = finish(sampled, tmp_path)
    assert run.code == 0, run.log[-4000:]

    wanted = {f"question {n} ?" for n in range(PROMPTS) if n % 4}
    made = steps(tmp_path)
    assert [row["step"] for row in made] == list(range(1, len(made) + 1)) and len(made) >= len(wanted) // 4
    assert sum(row[names.GROUPS_TOTAL] for row in made) == len(wanted), "each prompt is trained on once"
    if "asynchronous" in name:  # a resumed run that sampled anew what was ahead would have another 0
        assert [row[names.STALENESS_MEAN] for row in made] == [0] + [1] * (len(made) - 1)
    assert max(row[names.STALENESS_MAX] for row in made) <= 1
    assert all(row[names.IDLE_TRAINER] < row[names.TIMING_STEP_WALL] for row in made)
    dumps = [read_dump(path) for path in find_dumps(tmp_path / "checkpoints")]
    trained = [prompt for dump in dumps for prompt in prompts_of(dump, name)]
    asked = [next(question for question in wanted if question in prompt) for prompt in trained]
    assert len(asked) == len({*asked}), "no prompt is trained on twice"

    before = load_file(base / "model.safetensors")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    moved = {weight for weight in before if not torch.equal(weights[weight], before[weight].to(weights[weight].dtype))}
    if "adapters" in name:
        assert moved == {weight for weight in before if re.search("[qkvo]_proj.weight$", weight)}
        assert (tmp_path / "model" / "adapter" / "adapter_model.safetensors").is_file()
    else:
        assert any("experts" in weight for weight in moved) and len(moved) > len(before) // 2

    # What was sampled trains the same model again, also in a replay that is killed.
    if name in REPLAYED and len(dumps) == len(made):  # a dump that would be late is left out
        other = tmp_path / "replayed"
        other.mkdir()
        shutil.copy(tmp_path / "agent.py", other)
        own = {"ckpt.path": "checkpoints", "ckpt.output_dir": "model", "logger.metrics_path": "metrics.jsonl"}
        replay = [word for word in argv if word not in ("--train.async_enable", "--train.partial_rollout_enable")]
        replay += [word for flag, place in own.items() for word in (f"--{flag}", str(other / place))]
        replay += ["--train.replay_rollouts", str(tmp_path / "checkpoints"), "--ckpt.save_steps", "1"]
        killed([*replay, "--ckpt.load_enable"], other, after=1)
        replayed = finish([*replay, "--ckpt.load_enable"], other)
        assert replayed.code == 0, replayed.log[-4000:]
        again = load_file(other / "model" / "model.safetensors")
        assert all(torch.equal(again[weight], value) for weight, value in weights.items())
