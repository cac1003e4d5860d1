"""Every preset of train.sh passes the trainer's real parser, with the paper's settings in what comes out."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.algorithms import SURROGATES
from openrlhf_gtpo.cli import plan
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.training import host, run
from openrlhf_gtpo.training.settings import upstream_parser
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of, layout_of
from tests.support.launcher_runs import PRESETS, ROOT, SCRIPTS, resolved, run_script

PAPER = {"gtpo": ("gtpo", {"alpha1": 1.0, "alpha2": 0.1}), "grpo_s": ("grpo_s", {"beta1": 1.0, "beta2": 0.1})}


def _arguments(preset: str, *flags: str, **environment: str) -> SimpleNamespace:
    command = resolved("train.sh", preset, *flags, **environment)
    return run.parse(command[command.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :])


_parsed = functools.cache(_arguments)  # for tests that only read them


def test_there_are_the_presets_that_the_documents_name() -> None:
    gtpo = ["gtpo_32b", "gtpo_32b_async", "gtpo_7b_lora", "gtpo_async", "gtpo_colocated", "gtpo_guided_split"]
    gtpo += ["gtpo_one_gpu", "gtpo_split"]
    assert PRESETS == ["dapo_colocated", "grpo_colocated", "grpo_s_colocated", "grpo_s_split", *gtpo]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_comment_and_assignments_that_the_environment_overrides(preset: str) -> None:
    known = set(re.findall(r"^([A-Z0-9_]+)=", (SCRIPTS / "train.sh").read_text(), re.MULTILINE))
    lines = (SCRIPTS / "presets" / f"{preset}.sh").read_text().splitlines()
    code = [line for line in lines if not line.startswith("#")]
    assert code
    for line in code:
        assigned = re.fullmatch(r'([A-Z0-9_]+)="\$\{\1:?-[^"{}]+\}"( # .*)?', line)
        assert assigned is not None and assigned[1] in known, line


def test_the_names_of_the_last_release_are_links() -> None:
    links = [path for path in SCRIPTS.glob("train_*.sh") if path.is_symlink()]
    then = [preset for preset in PRESETS if not preset.endswith(("_async", "_lora"))]
    assert sorted(link.name for link in links) == [f"train_{preset}.sh" for preset in then]
    assert {link.readlink() for link in links} == {Path("train.sh")}
    assert resolved("train_gtpo_32b.sh", "--cpu") == resolved("train.sh", "gtpo_32b", "--cpu")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_parses_to_the_papers_settings(preset: str) -> None:
    args = _parsed(preset)
    learning_rate = 1e-6 if args.actor.lora is None else 1e-5
    assert (args.rollout.n_samples_per_prompt, args.train.batch_size) == (16, 128)
    assert args.actor.adam.lr == learning_rate
    assert (args.data.max_len, args.rollout.max_new_tokens, args.rollout.temperature) == (6144, 4096, 1.0)
    assert args.actor.eps_clip_low_high == [0.2, 0.28]
    assert args.algo.kl.init_coef == 0 and args.ckpt.load_enable and args.ckpt.save_steps > 0
    algorithm = next(name for name in ("grpo_s", "gtpo", "dapo", "grpo") if preset.startswith(f"{name}_"))
    estimator, weights = PAPER.get(algorithm, ("group_norm", {}))
    assert args.algo.advantage.estimator == estimator
    assert weights.items() <= (vars(vars(args.algo)[estimator]).items() if weights else {}.items())
    assert args.actor.loss_agg_mode == ("token-mean" if algorithm in ("gtpo", "dapo") else "seq-mean-token-mean")
    assert args.algo.dynamic_filtering_enable == (algorithm == "dapo" or "guided" in preset)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("flags", [(), ("--cpu",)], ids=["gpu", "cpu"])
def test_every_layout_fits_the_gpus_that_it_asks_for(preset: str, flags: tuple[str, ...]) -> None:
    args = _parsed(preset, *flags)
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    assert gpus % layout_of(args).model_parallel_size == 0
    engines, guide = args.vllm.num_engines * args.vllm.tensor_parallel_size, args.algo.guide
    if "guided" in preset:
        engines += guide.num_engines * guide.tensor_parallel_size
    if args.train.colocate_all:
        assert engines == gpus and args.megatron.offload
    else:
        assert "split" in preset or args.train.async_enable
        assert flags or gpus + engines == (64 if "32b" in preset else 8)
    assert args.train.batch_size % (gpus // layout_of(args).model_parallel_size) == 0
    assert (args.rollout.batch_size * args.rollout.n_samples_per_prompt) % args.train.batch_size == 0


def test_the_32b_preset_is_the_papers_cluster() -> None:
    args = _parsed("gtpo_32b")
    layout = layout_of(args)
    assert (args.actor.num_nodes, args.actor.num_gpus_per_node, layout.tensor_model_parallel_size) == (4, 8, 8)
    fp8 = fp8_of(args)
    assert fp8 is not None and (fp8.mode, fp8.recipe) == ("hybrid", "blockwise")
    assert args.megatron.fp8_audit_steps == 20


def test_the_guided_preset_is_gtpo_split_with_a_guide() -> None:
    guided, alone = _parsed("gtpo_guided_split"), _parsed("gtpo_split")
    assert (guided.actor.model_name_or_path, guided.algo.guide.model_name_or_path) == (
        "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"
    )  # fmt: skip
    guide = guided.algo.guide
    assert (guide.fraction, guide.steps, guide.rescue_batch, guide.tensor_parallel_size) == (0.25, 100, 32, 2)
    rescues = vars(alone.rollout) | {"joined_by": "--algo.guide.rescue_batch"}
    assert guided.actor == alone.actor and guided.megatron == alone.megatron and vars(guided.rollout) == rescues
    assert _parsed("gtpo_guided_split", "--cpu").algo.guide.rescue_batch == 2
    assert _arguments("gtpo_guided_split", GUIDE="").algo.guide.model_name_or_path is None


@pytest.mark.parametrize(
    "algorithm",
    ["gtpo", "grpo_s", "grpo", "dapo", "gspo", "dr_grpo", "rloo", "forking_tokens", "entropy_bonus"],
)
def test_a_comparison_is_one_word(algorithm: str) -> None:
    place = {"OUTPUT": "/tmp/run"}
    ours = resolved("train.sh", "gtpo_colocated", **place)
    theirs = resolved("train.sh", "gtpo_colocated", ALGORITHM=algorithm, **place)
    assert (ours == theirs) == (algorithm == "gtpo")
    others = [words[words.index("--actor.model_name_or_path") :] for words in (ours, theirs)]
    assert others[0] == others[1]  # the algorithm's flags come first
    assert _arguments("gtpo_colocated", ALGORITHM=algorithm).algo.kl.init_coef == 0


@pytest.mark.parametrize("algorithm", ["gtpo", "grpo"])
def test_so_is_a_surrogate_with_its_own_clip_range(algorithm: str) -> None:
    for name, kind in SURROGATES.items():
        if (algorithm, kind.level) == ("gtpo", "sequence"):
            continue
        actor = _arguments("gtpo_colocated", ALGORITHM=algorithm, SURROGATE=name).actor
        assert actor.policy_loss_type == name
        if hasattr(kind.config, "clip_low"):
            assert actor.eps_clip_low_high == [kind.config.clip_low, kind.config.clip_high]


@pytest.mark.parametrize("preset", ["grpo_s_colocated", "grpo_s_split", "grpo_colocated", "dapo_colocated"])
def test_a_preset_of_another_algorithm_is_that_one_word(preset: str) -> None:
    algorithm, placement = preset.rsplit("_", 1)
    named = resolved("train.sh", preset, OUTPUT="/tmp/run")
    assert named == resolved("train.sh", f"gtpo_{placement}", ALGORITHM=algorithm, OUTPUT="/tmp/run")


@pytest.mark.parametrize(
    ("settings", "folder"),
    [({}, ""), ({"ALGORITHM": "dapo"}, "-dapo"), ({"ALGORITHM": "grpo", "SURROGATE": "cispo"}, "-grpo-cispo")],
)
def test_another_algorithm_goes_on_with_no_run_of_the_preset(settings: dict[str, str], folder: str) -> None:
    command = resolved("train.sh", "gtpo_colocated", **settings)
    assert command[command.index("--ckpt.path") + 1].endswith(f"runs/train_gtpo_colocated{folder}/checkpoints")


def test_colocated_engines_fill_the_gpus_of_all_nodes() -> None:
    for preset, settings, engines in (
        ("grpo_s_colocated", {}, 4),
        ("grpo_s_colocated", {"NODES": "2"}, 8),
        ("gtpo_32b", {"NODES": "2"}, 2),
        ("gtpo_colocated", {"GPUS_PER_NODE": "1"}, 1),
        ("gtpo_split", {"NODES": "2"}, 4),
    ):
        assert _arguments(preset, **settings).vllm.num_engines == engines


@pytest.mark.parametrize("preset", ["gtpo_async", "gtpo_32b_async"])
def test_an_asynchronous_preset_is_the_split_one_with_the_entropies_of_the_policy_that_sampled(preset: str) -> None:
    args, in_turn = _parsed(preset), _arguments(preset, ASYNC="")
    assert (args.train.async_enable, args.rollout.entropy) == (True, "sampler") and not args.train.colocate_all
    assert (in_turn.train.async_enable, in_turn.rollout.entropy) == (False, "actor")
    for name in ("gtpo", "grpo_s"):  # each token's weight is min(ratio, 5), and a response's their mean
        found = vars(_arguments(preset, ALGORITHM=name).algo.advantage)
        correction = [found[f"is_correction_{part}"] for part in ("level", "mode", "gating", "threshold")]
        assert correction == ["token", "clip", "ratio", [0.0, 5.0]]


def test_the_environment_and_flags_of_the_trainer_win() -> None:
    args = _arguments("gtpo_colocated", "--", "--train.seed", "7", MODEL="my/model", STEPS="5", EVAL_DATA="")
    assert (args.train.seed, args.actor.model_name_or_path, args.data.max_samples) == (7, "my/model", 5 * 128)
    assert not args.eval.dataset and not _arguments("gtpo_colocated", DATA="my/data").eval.dataset
    assert _parsed("gtpo_colocated").eval.dataset == "data/dapo_math/eval.jsonl"
    assert _arguments("gtpo_colocated", DATA="my/data", EVAL_DATA="my/eval").eval.dataset == "my/eval"
    assert fp8_of(_arguments("gtpo_32b", FP8="")) is None and fp8_of(_parsed("gtpo_32b")) is not None


def test_what_a_cluster_runs_has_absolute_paths(tmp_path: Path) -> None:
    data = tmp_path / "train data.jsonl"
    for file in (data, data.with_name("eval.jsonl")):
        file.touch()
    command = resolved("train.sh", "gtpo_32b", "--submit", "http://127.0.0.1:8265", DATA=str(data), OUTPUT="runs/x")
    assert command[3:9] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"]
    assert command[command.index("--data.prompt_dataset") + 1] == str(data)
    assert command[command.index("--ckpt.path") + 1] == "/runs/x/checkpoints"
    assert Path(command[command.index("--reward.remote_url") + 1]).is_file()


@pytest.mark.parametrize(
    "flags, environment, message",
    [
        (["--dryrun"], {}, "unknown flag --dryrun; known: --cpu --dry-run"),
        (["--submit"], {}, "--submit needs the address"),
        ([], {"ALGORITHM": "ppo"}, "ALGORITHM is 'ppo'; it must be gtpo, grpo_s, grpo,"),
        (
            [],
            {"SURROGATE": "ppo"},
            "SURROGATE is 'ppo'; it must be cispo, sapo, gmpo, gspo_token, clip_cov, kl_cov, stare, hapo or",
        ),
        ([], {"PLACEMENT": "both"}, "PLACEMENT is 'both'; it must be colocated or split."),
        ([], {"FP8": "yes"}, "FP8 is 'yes'; it must be hybrid or e4m3, or empty for BF16."),
        ([], {"TENSOR_PARALLEL": "two"}, "TENSOR_PARALLEL is 'two'; it must be a number from 1 to 999999999."),
        ([], {"STEPS": "0"}, "STEPS is '0'"),
        ([], {"SAVE_STEPS": "often"}, "SAVE_STEPS is 'often'"),
        (
            [],
            {"DATA": "missing.jsonl"},
            "DATA=missing.jsonl does not exist; bash examples/scripts/train.sh --help says how to make it.",
        ),
        ([], {"DATA": "hub/data", "EVAL_DATA": "held_out.jsonl"}, "EVAL_DATA=held_out.jsonl does not exist"),
        ([], {"DATA": "hub/data", "OUTPUT": "/proc/none"}, "OUTPUT=/proc/none cannot be made."),
        ([], {"FP8": "hybrid", "FP8_PARAM": "0"}, "FP8_PARAM is '0'; it must be 1 or empty."),
        ([], {"FP8_RECIPE": "delayed"}, "FP8_RECIPE and FP8_PARAM need FP8"),
        ([], {"FP8_AUDIT_STEPS": "8"}, "it needs FP8, such as FP8=hybrid"),
        ([], {"FP8": "hybrid", "FP8_AUDIT_STEPS": "8", "ALGORITHM": "dapo"}, "FP8_AUDIT_STEPS=8 compares"),
        ([], {"RESCUE_BATCH": "8"}, "and RESCUE_BATCH need GUIDE"),
        (["--cpu"], {"GUIDE": "a/guide", "RESCUE_BATCH": "a"}, "RESCUE_BATCH is 'a'; it must be a number from 0 to"),
    ],
)
def test_a_mistake_is_one_sentence(flags: list[str], environment: dict[str, str], message: str) -> None:
    done = run_script("train.sh", "gtpo_colocated", *flags, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("train_gtpo_colocated: ") and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("words", "got"), [([], ""), (["gtpo"], "gtpo"), (["--cpu"], "")], ids=str)
def test_without_a_preset_their_names_are_told(words: list[str], got: str) -> None:
    done = run_script("train.sh", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"train: expected the name of a preset, one of: {' '.join(PRESETS)}; got '{got}'.\n"


@pytest.mark.parametrize("preset", PRESETS)
def test_help_is_the_presets_comment_and_the_scripts(preset: str) -> None:
    done = run_script("train.sh", preset, "--help")
    assert done.returncode == 0 and "Paper:" in done.stdout and "Techniques:" in done.stdout
    assert "set -e" not in done.stdout and "shellcheck" not in done.stdout
    assert f"examples/scripts/train.sh {preset}" in done.stdout and "--dry-run" in done.stdout
    assert done.stdout.endswith(run_script("train.sh", "--help").stdout)


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_the_planners_script_is_one_of_them(placement: str, tmp_path: Path) -> None:
    path = tmp_path / "planned.sh"
    words = f"--model 7b --gpus 8 --fp8 off --placement {placement} --emit {path}"
    assert plan.main(words.split()) == 0
    done = subprocess.run(["bash", str(path), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.replace("\\\n", " "))
    args = run.parse(command[command.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :])
    actor = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    assert (actor, engines) == (8, 8) if placement == "colocated" else actor + engines == 8
    assert (args.rollout.batch_size, args.train.batch_size) == (128, 128)
    assert f'export VLLM_MAX_NUM_SEQS="${{VLLM_MAX_NUM_SEQS-{Assumptions().vllm_rows}}}"\n' in path.read_text()
    assert (args.vllm.max_num_seqs, args.vllm.max_num_batched_tokens) == (1024, Assumptions().vllm_tokens)


def test_the_planners_script_has_its_fp8(tmp_path: Path) -> None:
    path = tmp_path / "planned.sh"
    assert plan.main(f"--model 32b --gpus 32 --nodes 4 --fp8-param --emit {path}".split()) == 0
    done = subprocess.run(["bash", str(path), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--megatron.fp8_param" in done.stdout.split() and "--megatron.fp8" in done.stdout.split()
    bf16 = os.environ | {"FP8": "", "FP8_PARAM": "", "FP8_RECIPE": "blockwise"}  # an empty FP8 is train.sh's for BF16
    done = subprocess.run(["bash", str(path), "--dry-run"], cwd=ROOT, env=bf16, capture_output=True, text=True)
    assert done.returncode == 0 and "--megatron.fp8" not in done.stdout


def test_flags_of_the_trainer_win_over_the_plan_s(tmp_path: Path) -> None:
    path = tmp_path / "planned.sh"
    assert plan.main(f"--model 7b --gpus 8 --entropy sampler --emit {path}".split()) == 0
    for words, entropy in (([], "sampler"), (["--", "--rollout.entropy", "actor"], "actor")):
        command = ["bash", str(path), "--dry-run", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        given = shlex.split(done.stdout.replace("\\\n", " "))
        assert run.parse(given[given.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :]).rollout.entropy == entropy


@pytest.mark.parametrize(
    "words", ["train.sh gtpo_split --dry-run", "benchmark_train.sh --dry-run", "quickstart.sh --help"]
)
def test_where_cd_looks_for_folders_does_not_matter(words: str) -> None:
    script, *flags = words.split()
    environment = {"PATH": os.environ["PATH"], "CDPATH": "."}
    command = ["bash", f"examples/scripts/{script}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "No such file" not in done.stderr


# Ray's command, as far as the words of a job go, and a Python that prints its own.
PROGRAMS = {
    "ray": """import os, subprocess, sys
print(sys.argv[1:5], os.environ["RAY_API_SERVER_ADDRESS"], os.environ["no_proxy"], flush=True)
sys.exit(subprocess.call(subprocess.list2cmdline(sys.argv[6:]), shell=True))""",
    "python3": "import json, sys; print(json.dumps(sys.argv[1:]))",
}


def test_a_job_gets_its_words_as_they_were_given(tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = [
        "<|user|>{}<|end|>",
        "it's $HOME, `x` and \\",
        'a \\"b"',
        '{"a":1,"b":2}',
        "*",
        "x?y&z;",
        " a\nb\n",
        "",
        "#",
    ]
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "a/name", "OUTPUT": str(tmp_path / "a run")}
    done = run_script("train.sh", "gtpo_split", "--submit", "http://n1:1", "--", *words, **settings)
    assert done.returncode == 0, done.stderr
    told, given = done.stdout.splitlines()
    assert told == "['job', 'submit', '--address', 'http://n1:1'] http://n1:1 *"
    given = json.loads(given)
    assert given[:2] == ["-m", "openrlhf_gtpo.cli.train_ppo_ray"] and given[-len(words) :] == words
    assert given[given.index("--ckpt.path") + 1] == f"{tmp_path}/a run/checkpoints"


# Bash functions in the environment: nothing is installed, and each Python command only prints its arguments.
ONLY_PRINTED = {
    "BASH_FUNC_source%%": '() { [[ "$1" == *setup_env.sh ]] || builtin source "$@"; }',
    "BASH_FUNC_setsid%%": '() { "$@"; }',
    "BASH_FUNC_python3%%": '() { printf "%s\\n" "$*"; }',
}


@pytest.mark.parametrize(
    ("flags", "label_key", "reward"),
    [([], "scorer_label", "reasoning_gym_reward.py"), (["--smoke", "--reward", "mine.py"], "label", "/mine.py")],
)
def test_the_quickstart_gives_a_reward_of_ones_own_the_answers(
    tmp_path: Path, flags: list[str], label_key: str, reward: str
) -> None:
    (tmp_path / "mine.py").touch()  # its path is given relative to /, where the script is called
    flags = [os.path.relpath(tmp_path / word, "/") if word == "mine.py" else word for word in flags]
    done = run_script("quickstart.sh", *flags, "--output", str(tmp_path), **ONLY_PRINTED)
    assert done.returncode == 0, done.stderr
    command = shlex.split((tmp_path / "train.log").read_text())
    assert command[command.index("--data.label_key") + 1] == label_key
    given = command[command.index("--reward.remote_url") + 1]
    assert given.endswith(reward) and ("--reward" not in flags or given == str(tmp_path / "mine.py"))
    assert ("to show learning" in done.stdout) == ("--smoke" in flags)


def quickstart_on_gpu(tmp_path: Path, *flags: str, **environment: str) -> tuple[list[str], Any]:
    """The trainer's command line on a host whose nvidia-smi finds a GPU, and the script's result."""
    functions = {
        **ONLY_PRINTED,
        "BASH_FUNC_source%%": '() { [[ "$1" == *setup_env.sh ]] && echo "sourced $*" || builtin source "$@"; }',
        "BASH_FUNC_nvidia-smi%%": "() { :; }",
        "BASH_FUNC_python3%%": '() { [[ "$1" != -c ]] && printf "%s\n" "$*"; }',  # the active Python is unfit
        "VIRTUAL_ENV": "/somewhere/.venv-cuda",
    }
    done = run_script("quickstart.sh", "--gpu", *flags, "--output", str(tmp_path), **functions | environment)
    assert done.returncode == 0, done.stderr
    return shlex.split((tmp_path / "train.log").read_text()), done


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_the_quickstart_takes_turns_on_one_gpu(tmp_path: Path, backend: str) -> None:
    """All else is as on a CPU, and the trainer accepts it."""
    command, done = quickstart_on_gpu(tmp_path, "--backend", backend)
    assert done.stdout.startswith("sourced examples/scripts/setup_env.sh --cuda\n")
    assert "with .venv-cuda active:" in done.stdout and f"report run {tmp_path}" in done.stdout
    shutil.rmtree(tmp_path)
    run_script("quickstart.sh", "--backend", backend, "--output", str(tmp_path), **ONLY_PRINTED)
    on_cpu = shlex.split((tmp_path / "train.log").read_text())
    own = ["--train.colocate_all", "--vllm.enable_sleep", "--vllm.gpu_memory_utilization", "0.3"]
    own += ["--megatron.offload"] * (backend == "megatron")
    assert sorted(command) == sorted([*on_cpu, *own])
    args = upstream_parser.parse(command[2:])
    assert args.train.colocate_all and args.vllm.enable_sleep and sum(host.gpus_of(args)) == 1


def test_the_quickstart_takes_an_active_environment_that_fits(tmp_path: Path) -> None:
    _, done = quickstart_on_gpu(tmp_path, **{"BASH_FUNC_python3%%": '() { [[ "$1" == -c ]] || printf "%s\n" "$*"; }'})
    assert "sourced" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--backend", "megatron", "--tensor-parallel", "3"],
            "--gpu runs on one GPU; leave --tensor-parallel, --pipeline-parallel",
        ),
        ([], "--gpu needs an NVIDIA GPU, and nvidia-smi finds none; leave it out"),
    ],
)
def test_a_gpu_that_is_not_there_is_noticed_before_anything_is_fetched(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    missing = {"BASH_FUNC_nvidia-smi%%": "() { return 9; }"}
    done = run_script("quickstart.sh", "--gpu", *flags, "--output", str(tmp_path), **ONLY_PRINTED | missing)
    assert done.returncode == 2 and done.stderr.startswith(f"quickstart: {message}") and not done.stdout


def test_what_the_quickstart_says_to_run_next_can_be_pasted(tmp_path: Path) -> None:
    output = tmp_path / "my run"
    done = run_script("quickstart.sh", "--output", str(output), **ONLY_PRINTED)
    ask, view = (shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  python3 -m "))
    assert ask[2:] == ["openrlhf_gtpo.cli.ask", f"{output}/model", "What is 3 * 4?"]
    assert view[2:] == ["openrlhf_gtpo.cli.view", str(output), "--output", f"{output}/view.html"]


def test_a_cpu_run_of_a_preset_is_watched_and_its_noise_goes_to_the_log(tmp_path: Path) -> None:
    data = tmp_path / "data" / "16-prompts" / "train.jsonl"
    data.parent.mkdir(parents=True)
    for file in (data, data.with_name("eval.jsonl")):
        file.touch()
    done = run_script("train.sh", "gtpo_split", "--cpu", OUTPUT=str(tmp_path), STEPS="2", **ONLY_PRINTED)
    assert done.returncode == 0, done.stderr
    assert "--actor.backend megatron" in (tmp_path / "train.log").read_text()
    assert "--actor.backend" not in done.stdout + done.stderr
    assert f"report watch {tmp_path}/metrics.jsonl --steps 2 --pid" in done.stdout
    assert f"report run {tmp_path}" in done.stdout and f"cli.ask {tmp_path}/model" in done.stdout


def test_the_quickstart_names_the_mistake_of_this_start_alone(tmp_path: Path) -> None:
    said = '() { case "$*" in *train_ppo_ray*) echo "train_ppo_ray: now."; return 2 ;; esac; }'
    (tmp_path / "train.log").write_text("train_ppo_ray: before.\n")
    done = run_script("quickstart.sh", "--output", str(tmp_path), **ONLY_PRINTED | {"BASH_FUNC_python3%%": said})
    assert done.returncode == 2
    assert "train_ppo_ray: now." in done.stderr and "before" not in done.stderr
    assert "before" in (tmp_path / "train.log").read_text()
