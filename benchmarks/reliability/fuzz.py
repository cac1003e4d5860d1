"""Hostile input for everything here that reads what others wrote: PYTHONPATH=. python3 benchmarks/reliability/fuzz.py

A case is a document of the right form with parts of it replaced, or text and bytes of no form at all. It ends well
where its parser takes it, or refuses it with the parser's own error in one line; anything else is a crash, which the
summary counts, with the first case of each place.

    --cases 10000 --seed 1 --output FILE [PARSER ...]      Hypothesis draws the cases
    --atheris                                              libFuzzer does, by coverage (pip install atheris)
"""

import argparse
import asyncio
import contextlib
import copy
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from openrlhf_gtpo.errors import SettingError, TrainingStopped, UsageError
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointError
from openrlhf_gtpo.model_shape import PRESETS

# ── Cases ──

MISSING = "\0missing"
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.5, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    "",
    " ",
    "\0",
    "a\nb",
    "\ud800",
    "é" * 300,
    "../../etc/passwd",
    "[bold]",
    "{0}{x}",
    "%s%n",
    "--",
    "-1",
    "nan",
    "1e999",
]
SCALARS = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]), st.integers(), st.floats(), st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def broken(valid: Any) -> st.SearchStrategy[Any]:
    """``valid`` with up to three of its parts replaced or left out."""
    change = st.tuples(st.sampled_from(list(_paths(valid))), st.one_of(st.just(MISSING), SCALARS, VALUES))
    return st.lists(change, max_size=3).map(lambda changes: _changed(valid, changes))


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from ((key, *path) for path in _paths(inner))


def _changed(valid: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    whole = [copy.deepcopy(valid)]
    for path, new in changes:
        place: Any = whole
        with contextlib.suppress(LookupError, TypeError):  # what is gone, or has another form by now
            for key in (0, *path)[:-1]:
                place = place[key]
            place[(0, *path)[-1]] = new
            if new is MISSING and path:
                del place[path[-1]]
    return None if whole[0] is MISSING else whole[0]


def _bytes(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True).encode()


def cut(text: bytes, places: list[tuple[int, bytes]]) -> bytes:
    """``text`` with bytes written over it, or cut off where there are none."""
    for place, new in places:
        at = place % (len(text) + 1)
        text = text[:at] + new + text[at + len(new) :] if new else text[:at]
    return text


def documents(*valid: Any) -> st.SearchStrategy[bytes]:
    """JSON files."""
    places = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), max_size=3)
    whole = st.one_of(*(broken(one) for one in valid)).map(_bytes)
    return st.one_of(whole, whole, st.builds(cut, whole, places), st.binary(max_size=40))


def lines(*valid: Any) -> st.SearchStrategy[bytes]:
    """JSON lines, of which most have the right form."""
    right = st.sampled_from([_bytes(one) for one in valid])
    return st.lists(st.one_of(right, right, documents(*valid)), max_size=5).map(b"\n".join)


# ── Parsers ──


class Parser(NamedTuple):
    """What draws a case, what reads it, and the errors that are the reader's own."""

    cases: st.SearchStrategy[Any]
    read: Callable[[Any], Any]
    refusals: tuple[type[Exception], ...] = (UsageError,)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="fuzz")


def folder() -> Path:
    return Path(_temporary().name)


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class NotOneLine(Exception):
    """A command ended without its one sentence."""


def command(name: str, argv: list[str]) -> None:
    """Run ``openrlhf_gtpo.cli.NAME``, which must end well, or badly with one line behind its usage."""
    from importlib import import_module

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    main = import_module(f"openrlhf_gtpo.cli.{name}").main
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as ended:
            status = ended.code
        out.flush(), err.flush()
    said = err.buffer.getvalue().decode("utf-8").strip()  # type: ignore[attr-defined]
    if status not in (0, None):
        sentence = said.rpartition("\n")[2] if said.startswith("usage: ") else said
        if status not in (1, 2) or not sentence or "\n" in sentence:
            raise NotOneLine(f"status {status!r}: {said[-300:]!r}")
        raise UsageError(sentence)


METRICS = [
    {"kind": "run", "step": 0, "time": 1.0, "run": "ab", "seed": 1, "estimator": "gtpo"},
    {"kind": "eval", "step": 0, "time": 2.0, "eval_products_pass1": 0.5, "eval_products_pass1_stderr": 0.1},
    {"kind": "train", "step": 1, "time": 3.0, "reward/mean": 0.5, "timing/step_total": 2.0, "warning/groups": "none."},
    {"kind": "eval", "step": 2, "time": 4.0, "eval_products_pass1": 0.75},
]


def read_metrics(data: bytes) -> None:
    path = written("metrics.jsonl", data)
    command("report", ["run", str(path)])
    command("report", ["compare", f"a={path}", f"b={path}"])


CONFIG = PRESETS["tiny"] | {"architectures": ["Qwen2ForCausalLM"], "head_dim": 64, "rope_scaling": None}
EXPERTS = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "auto_map": {"AutoConfig": "x.Y"},
    "quantization_config": {"bits": 4},
}
PLAN = "--gpus 8 --tensor-parallel 2 --pipeline-parallel 1 --context-parallel 1 --fp8 off --recompute none"


def plan_model(data: bytes) -> None:
    path = written("plan/config.json", data)
    command("plan", ["--model", str(path), *PLAN.split(), "--vllm-tensor-parallel", "2", "--expert-parallel", "1"])


def check_model_config(data: bytes) -> None:
    from openrlhf_gtpo.integration.checks import models

    path = str(written("model/config.json", data).parent)
    if not (folder() / "model/model.safetensors").exists():
        from safetensors.torch import save_file

        save_file({}, str(folder() / "model/model.safetensors"))
    models.refuse_own_code(path, "--model", "--trust")
    models.refuse_untransferable(path, "--model")
    config = models.check_model(path, "--model")
    from openrlhf_gtpo.integration.command_line.megatron_flags import refusals_name_flags
    from openrlhf_gtpo.megatron.parallel.layout import Layout, check_layout

    with refusals_name_flags():
        check_layout(config, Layout(), 1)


def check_weights_index(data: bytes) -> None:
    from openrlhf_gtpo.integration.checks.models import check_model

    path = written("index/model.safetensors.index.json", data).parent
    written("index/config.json", _bytes(CONFIG))
    check_model(str(path), "--model")


MANIFEST = {
    "format": 2,
    "written": 1.0,
    "model": {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "dtype": "bfloat16",
    "layout": {"tensor_model_parallel_size": 1},
    "world_size": 1,
    "optimizer": True,
    "distributed_optimizer": True,
    "metric": {"key": "x", "value": 0.5},
    "versions": {},
    "files": {"a.pt": {"size": 1, "xxh3": "e6c632b61e964e1f"}, "b.pt": {"size": 0, "xxh3": "2d06800538d394c2"}},
}


def read_checkpoint(case: tuple[bytes, bytes]) -> None:
    from openrlhf_gtpo.megatron.checkpoint import folder as checkpoints

    manifest, latest = case
    place = folder() / "checkpoints"
    written("checkpoints/latest", latest)
    for name in ("step1", "step2"):
        written(f"checkpoints/{name}/a.pt", b"a")
        written(f"checkpoints/{name}/b.pt", b"")
        written(f"checkpoints/{name}/checkpoint.json", manifest)
    config = SimpleNamespace(**MANIFEST["model"])  # type: ignore[arg-type]
    try:
        checkpoints.check_checkpoint(checkpoints.resolve(place), config, dtype="bfloat16")
    finally:
        checkpoints.rotate(place, "step2", max_num=2, max_mem_gb=1)


ROW = {"question": "What is 1 + 1?", "answer": "2"}
CHAT = {"question": [{"role": "user", "content": "Hi"}], "answer": "2"}


class Letters:
    """A tokenizer of letters, with a chat template as Jinja runs one."""

    chat_template = "template"

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return "".join(f"<|im_start|>{one['role']}\n{one['content']}" for one in messages)


def read_data_set(case: tuple[bytes, bool, str]) -> None:
    import datasets

    from openrlhf_gtpo.integration.checks.data import check_dataset

    data, chat, suffix = case
    args = SimpleNamespace(
        actor=SimpleNamespace(model_name_or_path="model"),
        rollout=SimpleNamespace(max_new_tokens=16),
        data=SimpleNamespace(
            input_key="question",
            label_key="answer",
            input_template=None,
            apply_chat_template=chat,
            max_len=64,
            max_samples=100,
        ),
    )
    # datasets keeps what it has read
    with tempfile.TemporaryDirectory(dir=folder()) as cache_folder:
        path = Path(cache_folder, f"train{suffix}")
        path.write_bytes(data)
        with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path(cache_folder, "cache")):
            check_dataset(args, Letters(), str(path), "train", "--data.prompt_dataset")


def prepare_math(case: tuple[Any, str, str, str]) -> None:
    from openrlhf_gtpo.tasks.math_data import write_math_files

    rows, key, after, instruction = case
    with tempfile.TemporaryDirectory(dir=folder()) as output:
        write_math_files(
            rows, output, problem_key=key, answer_after=after, instruction=instruction, eval_size=len(rows) // 3
        )


def prepare_task(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder()) as output:
        sizes = ["--train-size", "3", "--eval-size", "1"]
        command("prepare", ["task", "--output", output, *sizes, *argv])


def read_marker(data: bytes) -> None:
    from openrlhf_gtpo.tasks.build_once import build_once

    place = written("built/made_from.json", data).parent
    build_once(place, {"a": 1}, lambda empty: None)


class Plain:
    """A Python object that is no number."""


def rewards() -> st.SearchStrategy[Any]:
    import numpy
    import torch

    objects = st.sampled_from(
        [Plain(), torch.tensor([1.0, 2.0]), torch.tensor(0.5), torch.tensor([]), torch.tensor([True]), b"x", {1}, 1j]
        + [numpy.float32(1), numpy.array([[0.5]]), numpy.array(["x"]), torch.tensor([1 + 2j]), range(2), object]
    )
    return st.one_of(
        st.fixed_dictionaries(
            {"rewards": st.one_of(st.just(1.0), VALUES, objects)},
            optional={
                "scores": st.one_of(VALUES, objects),
                "extra_logs": st.one_of(st.dictionaries(st.text(max_size=3), VALUES | objects, max_size=2), VALUES),
            },
        ),
        VALUES,
        objects,
    )


@cache
def executor() -> Any:
    from openrlhf_gtpo.integration.rollout.rewards import Patience, StrictRewardExecutor

    path = written("reward.py", b"def reward_func(queries, prompts, labels): pass\n")
    return StrictRewardExecutor([str(path)], Patience())


class Engine:
    async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[52], text="4", finish_reason="stop", logprobs=None)]
        )


class TensorLetters(Letters):
    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


def _no_recovery(error: Exception) -> None:
    raise error


def make_row(answer: dict[str, Any]) -> None:
    """What an executor has returned, made into the row that the controller trains on."""
    from openrlhf_gtpo.integration.rollout.samples_generator import OrderedSamplesGenerator

    rows = OrderedSamplesGenerator(SimpleNamespace(args=None), None, None, None, [], recover=_no_recovery)
    rows._process_response_into_experience({**answer, "prompt_number": 1}, max_len=32)


RESPONSE = {
    "prompt": "2 + 2 = ",
    "label": "4",
    "images": None,
    "mm_train_inputs": None,
    "reward": 1.0,
    "scores": 1.0,
    "observation_tokens": [50, 32, 52],
    "action_ranges": [[2, 3]],
    "rollout_log_probs": [0.0, 0.0, -0.5],
    "truncated": False,
    "extra_logs": {"turns": 1},
}


def reward(returned: Any) -> None:
    executor().reward_func = lambda queries, prompts, labels: returned
    params = SimpleNamespace(max_tokens=4, logprobs=None)
    make_row(asyncio.run(executor().execute("2 + 2 = ", "4", params, 32, TensorLetters(), Engine())))


LABEL = {"task": "products", "entry": {"question": "2*2", "answer": "4", "metadata": {"difficulty": {}}}}


def task_reward(case: tuple[bytes, str]) -> None:
    from openrlhf_gtpo.tasks.reasoning_gym_reward import reward_func

    label, response = case
    prompt = "<|im_start|>assistant"
    found = reward_func([prompt + response], [prompt], [label.decode("utf-8", "replace")])
    assert 0 <= found["rewards"] <= 1


def math_answer(case: tuple[str, str]) -> None:
    from openrlhf_gtpo.tasks.math_verify_reward import judge

    judge(*case)


SCORED = [{"tokens": [1, 2, 3], "id": 1, "group": "a", "reward": 1.0}, {"tokens": [4, 5], "group": "a", "reward": 0}]


def read_rows(data: bytes) -> None:
    from openrlhf_gtpo.scoring.fp8_report import read_credit
    from openrlhf_gtpo.scoring.inputs import RowFile

    path = written("rows.jsonl", data)
    for row in RowFile(path, "/nowhere", 100, 50).rows():
        json.dumps(row.kept)
    read_credit(path)


@cache
def gguf() -> bytes:
    """A GGUF file of a Llama with one layer and a tokenizer, as the package that is converted has."""
    import numpy
    from gguf import GGUFWriter

    path = folder() / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(4)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a"])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, shape in {
        "token_embd": (4, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32),
    }.items():
        writer.add_tensor(f"{name}.weight", numpy.ones(shape, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def convert_gguf(places: list[tuple[int, bytes]]) -> None:
    from openrlhf_gtpo.tasks import smollm2

    place = written("gguf/tiny.gguf", cut(gguf(), places))
    with mock.patch.object(smollm2, "_find_gguf", lambda: place), tempfile.TemporaryDirectory(dir=folder()) as output:
        smollm2.convert_smollm2(output)


def wait_for_ray(case: tuple[Any, Any, Any]) -> None:
    from openrlhf_gtpo.launch.ray_wait import Dashboard

    dashboard = Dashboard("http://127.0.0.1:1", None)
    answers = list(reversed(case))

    def ask(path: str, body: Any = None) -> Any:
        if not answers:
            raise OSError("the head has ended")
        return answers.pop()

    with mock.patch.object(dashboard, "_ask", ask), mock.patch("openrlhf_gtpo.launch.ray_wait._PAUSE", 0):
        dashboard.alive()
        dashboard.runs_a_job()


# ── Command lines ──

PATHS = ["", "/", "/dev/null", "/dev/full", "/nowhere/x", ".", "a\nb", "é\ud800", "x" * 300, "-", "~"]


def words_of(parser: argparse.ArgumentParser) -> st.SearchStrategy[list[str]]:
    """Command lines of any flags of ``parser``, with values of their types and of any other."""
    word = st.one_of(
        st.sampled_from([*map(str, NUMBERS[:5]), "1e400", "nan", "-inf", "1_000", "٣", *TEXTS, *PATHS]),
        st.integers().map(str),
        st.floats().map(str),
        st.text(max_size=8),
    )
    word = word.map(lambda text: re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text))  # others stand for bytes
    flags = []
    for action in parser._actions:
        name = (action.option_strings or [""])[-1]
        if not name or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        value = (
            st.one_of(word, st.sampled_from([str(choice) for choice in action.choices])) if action.choices else word
        )
        if action.type in (int, float):
            value = st.one_of(value, st.integers(-2, 70).map(str), st.floats(0, 2).map(str))
        count = 0 if action.nargs == 0 else action.nargs if isinstance(action.nargs, int) else 1
        values = st.lists(value, min_size=count, max_size=count)
        flags.append(st.builds(lambda name, values: [name, *values], st.just(name), values))
        if count == 1:
            flags.append(value.map(lambda text, name=name: [f"{name}={text}"]))
    return st.lists(st.one_of(*flags, st.lists(word, max_size=1)), max_size=5).map(lambda parts: sum(parts, []))


RUN = "--reward.remote_url reward.py --vllm.num_engines 1 --actor.model_name_or_path /nowhere".split()
OF_OURS = [*RUN, *"--algo.advantage.estimator gtpo --rollout.n_samples_per_prompt 4 --algo.kl.init_coef 0".split()]
MEGATRON = [*OF_OURS, "--actor.backend", "megatron"]


class Kept(Exception):
    """Ends a command once it has made its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(main: Callable[[list[str]], Any], argv: list[str]) -> argparse.ArgumentParser:
    """The parser that a command makes."""

    def keep(parser: argparse.ArgumentParser, *args: Any) -> None:
        raise Kept(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", keep):
        try:
            main(argv)
        except Kept as kept:
            return kept.parser
    raise AssertionError("it parses nothing")


@cache
def train_parser() -> argparse.ArgumentParser:
    """Upstream's parser with this package's flags."""
    from openrlhf_gtpo.integration.command_line import upstream_parser

    return parser_of(upstream_parser.parse, RUN)


def train_flags(argv: list[str]) -> None:
    from openrlhf_gtpo.integration import run

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            run.check(run.parse(argv))
        except SystemExit as ended:
            assert ended.code == 0, ended.code


def cli_flags(case: tuple[str, list[str]]) -> None:
    """Every other command, up to where it would start its work."""
    from openrlhf_gtpo.cli import ask, benchmark, prepare, ray_cluster
    from openrlhf_gtpo.report import watch

    name, argv = case
    with contextlib.ExitStack() as stack:
        for module, work in (
            (ask, "answer"),
            (ray_cluster, "run_node"),
            (ray_cluster, "wait_for_nodes"),
            (watch, "watch"),
            (prepare, "convert_smollm2"),
            (prepare, "make_tiny_model"),
        ):
            stack.enter_context(mock.patch.object(module, work, lambda *args, **options: 0))
        stack.enter_context(mock.patch.object(ray_cluster, "make_token", lambda path: None))
        stack.enter_context(mock.patch.object(benchmark, "import_module", mock.Mock()))  # of the benchmark's file
        with tempfile.TemporaryDirectory(dir=folder()) as place:
            stack.enter_context(contextlib.chdir(place))
            command(name, argv)


COMMANDS = {
    "ask": ["/nowhere why?"],
    "score": ["--model /nowhere --input /nowhere --output scores"],
    "plan": [f"--model 3b {PLAN}"],
    "report": [
        "run /nowhere",
        "compare a=/nowhere",
        "watch x --steps 1 --pid 1",
        "fp8 --model /nowhere --input /nowhere --output out",
    ],
    "convert": ["hf-to-megatron /nowhere out", "megatron-to-hf /nowhere out"],
    "prepare": [
        "smollm2 --output out",
        "tiny-model --output out",
        "math --source /nowhere.jsonl",
        "task --preset smoke --train-size 2 --eval-size 1 --output out",
    ],
    "benchmark": ["overhead --model /nowhere", "lm-head", "weight-sync", "layers", "train-step", "train"],
    "ray_cluster": ["head --address 127.0.0.1", "wait --nodes a"],
}


def command_lines() -> st.SearchStrategy[tuple[str, list[str]]]:
    from importlib import import_module

    found = []
    for name, starts in COMMANDS.items():
        whole = parser_of(import_module(f"openrlhf_gtpo.cli.{name}").main, [])
        for start in map(str.split, starts):
            parser = whole
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and start[0] in action.choices:
                    parser = action.choices[start[0]]
            more = words_of(parser)
            found.append(
                st.builds(lambda name, start, more: (name, [*start, *more]), st.just(name), st.just(start), more)
            )
    return st.one_of(*found)


# Each is made when it is asked for: some import what others do not.
PARSERS: dict[str, Callable[[], Parser]] = {
    "metrics": lambda: Parser(lines(*METRICS), read_metrics),
    "config_plan": lambda: Parser(documents(CONFIG, EXPERTS), plan_model),
    "config_run": lambda: Parser(documents(CONFIG, EXPERTS), check_model_config),
    "weights_index": lambda: Parser(
        documents({"metadata": {}, "weight_map": {"a": "b.safetensors"}}), check_weights_index
    ),
    "checkpoint": lambda: Parser(
        st.tuples(documents(MANIFEST), st.sampled_from([b"step2", b"step1\n"]) | st.binary(max_size=12)),
        read_checkpoint,
        (CheckpointError,),
    ),
    "data_set": lambda: Parser(
        st.tuples(lines(ROW, CHAT), st.booleans(), st.sampled_from([".jsonl", ".jsonl", ".json", ".csv", ".parquet"])),
        read_data_set,
    ),
    "math_rows": lambda: Parser(
        st.tuples(
            st.lists(
                broken({"problem": "1 + 1?", "answer": "2"}).filter(lambda row: isinstance(row, dict)), max_size=4
            ),
            st.sampled_from(["problem", "problem.text", "", "."]),
            st.sampled_from([None, "", "####"]),
            st.sampled_from(["", "Think."]),
        ),
        prepare_math,
        (ValueError,),
    ),
    "task_config": lambda: Parser(
        st.tuples(
            st.sampled_from(["products", "gcd", "chain_sum", "no_such", ""]),
            # A number of 2^63 digits is what was asked for, and takes as long.
            broken({"max_digits": 2, "min_terms": 2, "max_terms": 3})
            .map(json.dumps)
            .filter(lambda text: not re.search(r"\d{4}|\de", text))
            | st.text(max_size=9),
        ).map(lambda case: ["--task", case[0], f"--task-config={case[1]}"]),
        prepare_task,
    ),
    "build_marker": lambda: Parser(
        documents({"recipe": {"a": 1}, "files": {"b": 3}}, {"recipe": {"a": 1}, "files": {}}),
        read_marker,
        (ValueError,),
    ),
    "reward": lambda: Parser(rewards(), reward, (TrainingStopped,)),
    "agent": lambda: Parser(
        broken(RESPONSE).filter(lambda made: isinstance(made, dict)), make_row, (TrainingStopped,)
    ),
    "task_reward": lambda: Parser(
        st.tuples(documents(LABEL), st.text(max_size=20) | st.sampled_from(["4", "<answer>4</answer>", "9" * 5000])),
        task_reward,
        (ValueError,),
    ),
    "math_reward": lambda: Parser(
        st.tuples(*[st.text(alphabet="0123456789+-*/^=(){}[]\\boxedfracsqrt$., xπ\0", max_size=25)] * 2),
        math_answer,
        (ValueError,),
    ),
    "score_rows": lambda: Parser(lines(*SCORED), read_rows),
    "gguf": lambda: Parser(
        st.lists(st.tuples(st.integers(0, 1200), st.binary(max_size=8)), min_size=1, max_size=3),
        convert_gguf,
        (ValueError,),
    ),
    "ray_dashboard": lambda: Parser(
        st.tuples(
            broken({"data": {"result": {"result": [{"node_name": "a", "state": "ALIVE"}]}}}),
            broken({"submission_id": "a"}),
            broken({"status": "FAILED"}),
        ),
        wait_for_ray,
    ),
    "train_flags": lambda: Parser(
        st.builds(
            lambda start, more: [*start, *more], st.sampled_from([RUN, OF_OURS, MEGATRON]), words_of(train_parser())
        ),
        train_flags,
        (UsageError, OSError),  # of a path that no file can have; train_ppo_ray says it
    ),
    "cli_flags": lambda: Parser(command_lines(), cli_flags),
}


# ── Runs ──


class Tally:
    """What became of the cases of one parser."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.ends: Counter[str] = Counter()
        self.crashes: dict[str, str] = {}

    def run(self, case: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.parser.read(case)
            self.ends["taken"] += 1
        except self.parser.refusals as error:
            sentence = error.sentence if isinstance(error, SettingError) else str(error)
            if sentence.strip() and "\n" not in sentence.strip():
                self.ends["refused"] += 1
            else:
                self._crashed(case, error, "refused in another way than one line")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | MemoryError):
                raise
            self._crashed(case, error, type(error).__name__)

    def _crashed(self, case: Any, error: BaseException, kind: str) -> None:
        self.ends["crashed"] += 1
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/openrlhf_gtpo/" in frame.filename]
        place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))
        self.crashes.setdefault(f"{kind} at {place or 'no line of ours'}", f"{str(error)[:300]!r} for {case!r:.400}")

    def summary(self) -> dict[str, Any]:
        return {"cases": sum(self.ends.values()), **{end: self.ends[end] for end in ("taken", "refused", "crashed")}}


def quiet() -> None:
    """Libraries log what they are about to raise."""
    import datasets
    import transformers

    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


ANY_CASE = settings(database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def fuzz(name: str, cases: int, number: int) -> Tally:
    """Run ``cases`` cases of one parser, drawn by Hypothesis from the seed ``number``."""
    tally = Tally(PARSERS[name]())

    @seed(number)
    @settings(ANY_CASE, max_examples=cases)
    @given(tally.parser.cases)
    def run(case: Any) -> None:
        tally.run(case)

    run()
    return tally


def fuzz_by_coverage(name: str, cases: int, number: int, done: Callable[[Tally], None]) -> None:
    """The same, with libFuzzer choosing the bytes that Hypothesis draws from; ``done`` ends the process."""
    import atheris

    with atheris.instrument_imports(include=["openrlhf_gtpo"]):
        fuzz(name, 5, number)  # what the first cases import is instrumented too
    tally = Tally(PARSERS[name]())

    @ANY_CASE
    @given(tally.parser.cases)
    def run(case: Any) -> None:
        tally.run(case)

    def one(data: bytes) -> None:
        run.hypothesis.fuzz_one_input(data)
        if sum(tally.ends.values()) >= cases:
            done(tally)

    atheris.Setup([sys.argv[0], f"-seed={number}", "-max_len=4096", "-verbosity=0"], one)
    atheris.Fuzz()


def run_one(name: str, cases: int, number: int, by_coverage: bool) -> None:
    """Fuzz one parser, and print its summary as the last line."""

    def done(tally: Tally) -> None:
        print(json.dumps(tally.summary() | {"crashes": tally.crashes}), flush=True)
        os._exit(0)  # libFuzzer has no other end

    quiet()
    if by_coverage:
        fuzz_by_coverage(name, cases, number, done)
    done(fuzz(name, cases, number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help=f"of {', '.join(PARSERS)} (default: all)")
    parser.add_argument("--cases", type=int, default=10_000, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, help="write a JSON summary to this file; of other parsers it keeps what it has"
    )
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer choose the cases")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        run_one(args.parsers[0], args.cases, args.seed, args.atheris)
    found: dict[str, Any] = {}
    if args.output and args.output.exists():
        found = json.loads(args.output.read_text())["parsers"]
    names = args.parsers or list(PARSERS)
    for name in names:  # each in a process of its own, which a library may take down
        words = [sys.executable, __file__, name, "--alone", "--cases", str(args.cases), "--seed", str(args.seed)]
        words += ["--atheris"] * args.atheris
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz") as place:  # the process cleans up nothing
            ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": place})
        if ended.returncode:
            one = {"crashed": 1, "crashes": {f"the process ended with status {ended.returncode}": ended.stdout[-300:]}}
        else:
            one = json.loads(ended.stdout.strip().splitlines()[-1])
        by = {"by": "atheris" if args.atheris else "hypothesis", "seed": args.seed}
        found[name] = one | by | {"seconds": round(time.monotonic() - start, 1)}
        print(name, {key: value for key, value in found[name].items() if key != "crashes"}, flush=True)
        for place, first in one["crashes"].items():
            print(f"    {place}\n        {first}", flush=True)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps({"parsers": found}, indent=1) + "\n")
    sys.exit(any(found[name]["crashes"] for name in names))


if __name__ == "__main__":
    main()
