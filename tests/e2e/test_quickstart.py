"""The README's command as written: these tests catch a launcher whose flags, files or reports do not fit together."""

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from openrlhf_gtpo.cli import ask, view
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training import host, run
from tests.e2e.conftest import REWARD, ROOT
from tests.support import command_of
from tests.support.command_lines import parser
from tests.support.phases import check_phases

SCRIPT = ROOT / "examples" / "scripts" / "quickstart.sh"
ESTIMATORS = " ".join(parser(extended=True)._option_string_actions["--algo.advantage.estimator"].choices or ())


@pytest.mark.e2e
@pytest.mark.slow
def test_a_smoke_run_ends_with_a_table_curves_and_a_model(tmp_path: Path) -> None:
    """A run stopped while it starts leaves no process; test_launch_scripts.py shows that it leaves none later."""
    output = tmp_path / "run"
    command = ["bash", str(SCRIPT), "--smoke", "--steps", "4", "--output", str(output), "--reward", str(REWARD)]
    command += ["--", "--algo.advantage.is_correction_level", "token", "--train.colocate_all"]
    command += ["--vllm.enable_prefix_caching", "--vllm.sync_checksum", "--data.label_key", "scorer_label"]

    shell = psutil.Popen(command, stderr=subprocess.PIPE, text=True)
    started = ""
    while "openrlhf_gtpo.cli.train_ppo_ray" not in started or "openrlhf_gtpo.cli.report" not in started:  # to watch it
        assert shell.poll() is None
        time.sleep(0.2)
        processes = shell.children(recursive=True)
        started = "\n".join(map(command_of, processes))
    shell.terminate()
    progress = shell.communicate()[1]
    assert shell.returncode == 143 and "resumes from the last checkpoint" in progress and "Traceback" not in progress
    _, alive = psutil.wait_procs(processes, timeout=600)
    assert not alive

    done = subprocess.run(command, capture_output=True, text=True)
    printed, progress = done.stdout, done.stderr
    assert done.returncode == 0, progress[-3000:]
    assert "products" in printed and "curves.png" in printed
    assert "for example, with reward" in progress and "step 4/4" in progress  # a line per step if there is no terminal
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    [metrics] = read_runs(output)
    metrics = [entry for entry in metrics if entry["kind"] != names.KIND_RUN]
    assert [(m["kind"], m["step"]) for m in metrics] == [
        ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("train", 4), ("eval", 4)
    ]  # fmt: skip
    assert [names.OUTCOMES in step for step in metrics[1:5]] == [True, False, False, False]
    for step in metrics[1:5]:
        for name in (names.ENTROPY_ALL, names.SHARES_STD, names.ADVANTAGE_MAX, names.CLIP_FRACTION):
            assert step[name] is not None
        assert step[names.tokens_per_second("generation")] > 0
        assert "assistant" in step[names.SAMPLE] and 0 <= step[names.SAMPLE_REWARD] <= 1
        assert abs(step["vllm_kl"]) < 0.05  # vLLM and the trainer agree on what was sampled
    # Entropies come from the sampler, and are compared with the actor's forward in the first step alone.
    assert [step.get(names.SAMPLER_IN_USE) for step in metrics[1:5]] == [1, None, None, None]
    forward = names.peak_memory("actor", "old_log_probs")  # only if the process worked in the phase
    assert [forward in step for step in metrics[1:5]] == [True, False, False, False]
    check_phases(metrics[1:5])
    assert "openrlhf_gtpo.cli.view" in printed
    assert view.main([str(output), "--output", str(output / "view.html")]) == 0
    (data,) = re.findall(r'id="data">(.*)</script>', (output / "view.html").read_text())
    steps = json.loads(data)["steps"]
    assert [(step["step"], len(step["row"])) for step in steps] == [(1, 32), (2, 32), (3, 32), (4, 32)]
    for step in steps:  # the dump's own credit is what was trained on
        assert all(step["credits"]) and step["trained"] is None and step["sampler"] is not None
    assert ask.answer(str(output / "model"), "What is 2 * 3?", max_tokens=4)

    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "holds an earlier run; continue it with --resume" in again.stderr
    again = subprocess.run([*command[:3], "--resume", *command[3:], "--no.flag"], capture_output=True, text=True)
    assert again.returncode == 2 and "train_ppo_ray: unrecognized arguments: --no.flag" in again.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz"),
        (["--steps", "none"], "--steps none is not a number from 1 to 999999999"),
        (["--model"], "--model needs a value"),
        (["--output", "--smoke"], "--output needs a value"),
        (["--output", ""], "--output needs a value"),
        (["--steps", "9" * 20], "is not a number from 1 to 999999999"),
        (["--reward", "no.py"], "no.py does not exist"),
        (["--resume", "--output", "none"], "none holds no run to continue"),
        (["--estimator", "ppo"], f"--estimator ppo is none of {ESTIMATORS}."),
        (["--backend", "fsdp"], "--backend fsdp is neither deepspeed nor megatron"),
        (
            ["--backend", "megatron", "--pipeline-parallel", "0"],
            "--pipeline-parallel 0 is not a number from 1 to 999999999",
        ),
        (["--tensor-parallel", "2"], "--tensor-parallel 2 needs --backend megatron"),
        (["--moe", "--expert-parallel", "2"], "--expert-parallel 2 needs --backend megatron"),
    ],
)
def test_wrong_flag_is_one_sentence_before_anything_is_set_up(flags: list[str], message: str, tmp_path: Path) -> None:
    ended = subprocess.run(["bash", str(SCRIPT), *flags], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("quickstart: ") and message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_readmes_own_command_is_accepted(
    tiny_model: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed command for the user's own model, data and reward, with files in place of its names."""
    readme = (ROOT / "README.md").read_text()
    block = next(text for text in re.findall(r"```bash\n(.*?)```", readme, re.S) if "train_ppo_ray" in text)
    reward = tmp_path / "reward.py"
    reward.write_text(re.search(r"```python\n(.*?)```", readme, re.S).group(1))  # type: ignore[union-attr]
    files = {"MODEL": tiny_model, "DATA.jsonl": task / "train.jsonl", "REWARD.py": reward}
    command = next(line for line in block.replace("\\\n", " ").splitlines() if "train_ppo_ray" in line)
    monkeypatch.chdir(tmp_path)
    args = run.parse([str(files.get(word, word)) for word in shlex.split(command)[3:]])
    run.check(args)
    assert sum(host.gpus_of(args)) == 2  # on a laptop, as many processes
