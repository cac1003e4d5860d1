"""A model on the Hub is fetched once, whole and without anything else; without a network the cache suffices, or one
sentence says what is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import files
from openrlhf_gtpo.platform.files import INDEX, model_folder, replace_text, weight_shapes

COMMIT = "0" * 40
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
FILES = dict.fromkeys(["config.json", "tokenizer.json", *SHARDS.values()], "{}")
FILES |= {INDEX: json.dumps({"weight_map": SHARDS})}
UNREAD = dict.fromkeys(["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "a.py"], "")


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of a Hub that has only the model ``someone/something``, and the files that it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, text, status = self.path.partition("?")[0], "", 200
            there = FILES | UNREAD
            if path == "/api/models/someone/something/revision/main":
                asked.append("what there is")
                text = json.dumps({"id": "someone/something", "sha": COMMIT, "siblings": []})
            elif path.startswith(f"/api/models/someone/something/tree/{COMMIT}"):
                text = json.dumps(
                    [
                        {"type": "file", "path": name, "size": len(there[name]), "oid": f"{n:040}"}
                        for n, name in enumerate(there)
                    ]
                )
            elif path.startswith(f"/someone/something/resolve/{COMMIT}/"):
                name = path.split("/", 5)[5]
                text = there[name]
                if self.command == "GET":
                    asked.append(name)
            else:
                status = 404
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            elif "/resolve/" in path:
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{list(there).index(name):040}"')
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


PROGRAM = """
import sys
from openrlhf_gtpo.platform.files import model_folder
try:
    print(model_folder(sys.argv[1]))
    assert model_folder(sys.argv[1]) == model_folder(sys.argv[1])
except ValueError as error:
    print(error)
"""


def test_processes_fetch_a_model_once_and_nothing_that_is_not_read(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}

    def start(name: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name], env=environment, stdout=subprocess.PIPE, text=True
        )

    processes = [start(name) for name in ("someone/something", "someone/something", "someone/nothing")]
    first, second, unknown = (process.communicate()[0].strip() for process in processes)
    assert first == second and sorted(file.name for file in Path(first).iterdir()) == sorted(FILES)
    assert sorted(asked) == sorted([*FILES, *["what there is"] * 2])
    assert unknown.startswith("someone/nothing is not a folder on ")
    assert "Repository Not Found" in unknown


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lay out the cache folder of ``someone/something`` with these of its files; nothing can be fetched."""
    files._snapshot.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def lay_out(*names: str) -> Path:
        model = tmp_path / "models--someone--something"
        snapshot = model / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)
        for name in names:
            (snapshot / name).write_text(FILES.get(name, ""))
        return snapshot

    return lay_out


def test_what_is_cached_does_without_a_network(cached: Callable[..., Path], tmp_path: Path) -> None:
    folder = cached(*FILES)
    assert model_folder("someone/something") == folder
    assert model_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("names", "missing"),
    [(("config.json",), "*.safetensors"), (("config.json", INDEX, SHARDS["a"]), SHARDS["b"])],
    ids=["configuration-alone", "a-shard-short"],
)
def test_a_part_of_a_model_is_no_model(cached: Callable[..., Path], names: tuple[str, ...], missing: str) -> None:
    folder = cached(*names)
    assert model_folder("someone/something", weights=False) == folder
    with pytest.raises(UsageError, match=f"the weights in {folder} lack ") as refusal:
        model_folder("someone/something")
    assert f"lack {missing}; fetch them where there is a network (hf download someone/something)" in str(refusal.value)
    (folder / INDEX).write_text('{"weight_map": ')
    with pytest.raises(UsageError, match=f"{folder}: {INDEX} cannot be read: Expecting value"):
        model_folder("someone/something")


def test_a_model_that_is_neither_here_nor_cached(
    cached: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="someone/something .*HF_HUB_OFFLINE"):
        model_folder("someone/something")
    with pytest.raises(UsageError, match="Repo id must"):
        model_folder(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)
    with pytest.raises(UsageError, match="someone/something .*refused"):
        model_folder("someone/something")


def test_a_second_copy_of_the_weights_does_not_count(tmp_path: Path) -> None:
    """As in the folder of a Mistral model, under other names."""
    for file, name in (("model.safetensors", "model.norm.weight"), ("consolidated.safetensors", "norm.weight")):
        save_file({name: torch.zeros(2, 3)}, tmp_path / file)
    assert weight_shapes(tmp_path) == {"model.norm.weight": (2, 3)}


def test_a_weight_in_two_files_is_not_chosen_by_chance(tmp_path: Path) -> None:
    """Transformers would read model.safetensors, vLLM what an index names, and mbridge without one any file."""
    for file in ("model.safetensors", "ema.safetensors"):
        save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / file)
    with pytest.raises(UsageError, match="ema.safetensors and model.safetensors both have the weight model.norm.we"):
        weight_shapes(tmp_path)


def test_a_text_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    replace_text(tmp_path / "flags.json", "whole")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "flags.json", "half \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["flags.json"]
    assert (tmp_path / "flags.json").read_text() == "whole"
