"""The command line: what it accepts and refuses as input, and that it reaches both backends, whose results
``test_score.py`` tests.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openrlhf_gtpo.cli import score as cli
from openrlhf_gtpo.scoring.inputs import RowFile

VOCABULARY, LONGEST = 16, 24


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A command line that works."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"tokens": [1, 2, 3]}\n')
    return {"--model": model, "--input": source, "--output": tmp_path / "out.jsonl"}


def argv(flags: dict[str, Any]) -> list[str]:
    return [str(word) for flag, value in flags.items() for word in ([flag] if value is None else [flag, value])]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_text_is_tokenized_as_it_is_and_only_the_response_is_scored(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"prompt": "two times three is", "response": "six .", "id": "a"}\n'
        '{"tokens": [1, 3, 2, 4, 5, 7], "id": null, "other": 3}\n'
        '{"prompt": "two", "response": ""}\n'
        '{"tokens": [4]}\n'
    )
    rows = list(RowFile(path, str(model), VOCABULARY, LONGEST).rows())
    assert [row.tokens for row in rows] == [[1, 3, 2, 4, 5, 7], [1, 3, 2, 4, 5, 7], [1], [4]]
    assert [row.scored for row in rows] == [2, 5, 0, 0]
    assert [row.kept for row in rows] == [{"id": "a"}, {"id": None}, {}, {}]
    assert [row.line for row in rows] == [1, 2, 3, 4]


@pytest.mark.slow
def test_both_backends_from_the_command_line(model: Path, tmp_path: Path) -> None:
    """Megatron runs in processes of its own, Transformers in those of torchrun."""
    source = tmp_path / "in.jsonl"
    tokens, text = {"tokens": [1, 3, 2, 4, 5, 7]}, {"id": 7, "prompt": "two times three is", "response": "six ."}
    source.write_text("".join(json.dumps(entry) + "\n" for entry in (tokens, {"tokens": [4]}, text)))
    flags = {"--model": model, "--input": source, "--dtype": "float32", "--temperature": 0.5, "--max-tokens": 7}
    megatron = {"--actor.backend": "megatron", "--megatron.tensor_model_parallel_size": 2}
    outputs = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    assert cli.main(argv({**flags, **megatron, "--output": outputs[0]})) == 0
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "openrlhf_gtpo.cli.score"]
    command = [sys.executable, "-m", *torchrun, *argv({**flags, "--output": outputs[1]})]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    results = [read(output) for output in outputs]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl", "in.jsonl"]
    for whole, single, response in results:
        assert single == {"log_probs": [], "entropies": []}
        assert response["id"] == 7 and "id" not in whole
        # The response's two tokens are the last of the same sequence.
        for kind in ("log_probs", "entropies"):
            assert len(whole[kind]) == 5
            np.testing.assert_allclose(response[kind], whole[kind][-2:], rtol=0, atol=1e-5)
    for one, other in zip(*results, strict=True):
        for kind in ("log_probs", "entropies"):
            np.testing.assert_allclose(one[kind], other[kind], rtol=0, atol=1e-5)


def test_an_output_that_is_no_regular_file_is_not_replaced(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root, a rename would replace a device such as /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    refuse(flags | {"--output": tmp_path / "pipe"}, f"--output {tmp_path / 'pipe'} cannot be written", capsys)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_code_of_the_checkpoint_is_not_run_unasked(
    flags: dict[str, Any],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "with_code"
    shutil.copytree(model, folder)
    mark = f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
    (folder / "own.py").write_text(f"from transformers import LlamaConfig\n{mark}class Own(LlamaConfig): ...\n")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"auto_map": {"AutoConfig": "own.Own"}}))
    chosen = flags | {"--model": folder, "--actor.backend": backend}
    refuse(chosen, f"--model {folder} brings its own Python code (auto_map in its config.json)", capsys)
    assert not (tmp_path / "mark").exists()
    flags["--input"].write_text("")
    assert cli.main([*argv(chosen), "--trust-remote-code"]) == 2  # because of its input, read after the configuration
    assert (tmp_path / "mark").exists()


def refuse(flags: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the command line ends with 2 and one sentence, and leaves no file behind."""
    folder = flags["--input"].parent if isinstance(flags["--input"], Path) else None
    before = sorted(folder.iterdir()) if folder else None
    assert cli.main(argv(flags)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("score: ") and printed.err.count("\n") == 1 and not printed.out
    assert folder is None or sorted(folder.iterdir()) == before
