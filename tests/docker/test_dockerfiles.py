"""Images run as a user, copy what is there, keep no secret, and install no package again after a change of code."""

import json
import re
import subprocess

import pytest

import openrlhf_gtpo
from tests.support.dockerfiles import DOCKERFILES, ROOT, arguments, instructions, is_ignored

both = pytest.mark.parametrize("platform", DOCKERFILES)


def last(platform: str, name: str) -> str:
    return [i.value for i in instructions(platform) if i.name == name][-1]


@both
def test_the_last_user_is_a_number_and_not_root(platform: str) -> None:
    assert last(platform, "USER") == "${UID}"
    assert int(arguments(platform)["UID"]) > 0
    after = [i.name for i in instructions(platform)]
    assert {"ENTRYPOINT", "CMD"} <= set(after[len(after) - after[::-1].index("USER") :])


@both
def test_base_images_are_named_with_a_tag(platform: str) -> None:
    stages = {"${BASE_IMAGE}"}
    for instruction in instructions(platform):
        if instruction.name == "FROM":
            image, *alias = instruction.value.split(" AS ")
            assert image in stages, f"{image} is neither a stage nor the base that --build-arg BASE_IMAGE names"
            stages |= set(alias)
    tag = arguments(platform)["BASE_IMAGE"].partition(":")[2]
    assert tag and "latest" not in tag


@both
def test_what_is_copied_is_there_and_let_in(platform: str) -> None:
    sources = []
    for instruction in instructions(platform):
        if instruction.name == "COPY" and "--from=" not in instruction.value:
            words = [word for word in instruction.value.split() if not word.startswith("--")]
            sources += words[:-1]
    assert "." in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source == "." or not is_ignored(source), source


@both
def test_a_change_of_code_installs_no_package_again(platform: str) -> None:
    order = [f"{i.name} {i.value}" for i in instructions(platform)]
    (code,) = [n for n, text in enumerate(order) if text.startswith("COPY") and text.endswith(" . .")]
    downloads = [n for n, text in enumerate(order) if re.search("pip (install|wheel)|setup_env.sh|apt-get", text)]
    after = [order[n] for n in downloads if n > code]
    assert any(n < code for n in downloads)
    # What is left only links the project, without an index.
    assert all("--no-index" in text or text == "RUN bash examples/scripts/setup_env.sh" for text in after), after


@both
def test_no_package_lists_and_no_secrets_are_kept(platform: str) -> None:
    for name, value in instructions(platform):
        if name == "RUN" and "apt-get" in value:
            assert "rm -rf /var/lib/apt/lists/*" in value and "--no-install-recommends" in value
        if name in ("ARG", "ENV", "LABEL"):
            assert not re.search(r"(?i)token|password|secret|index.url|https?://", value), value
        if name == "RUN" and re.search(r"pip (install|wheel)", value):
            assert "--no-index" in value or "--mount=type=secret,id=pip_conf,target=/etc/pip.conf" in value


@both
def test_a_stage_declares_the_arguments_that_it_uses(platform: str) -> None:
    """Not every builder passes on a parent stage's arguments."""
    declared: set[str] = set()
    used = []
    for name, value in instructions(platform):
        if name == "FROM":
            declared = set()
        elif name == "ARG":
            declared.add(value.split("=")[0])
        elif name == "RUN":
            asked = set(re.findall(r"\$\{([A-Z_]+)", value))
            assert asked <= declared, value
            used += asked
    assert "UID" in used


def test_a_compiled_wheel_never_comes_from_a_cache() -> None:
    """pip's cache does not know which torch a wheel was compiled against."""
    compiled = [i.value for i in instructions("cuda") if i.name == "RUN" and "pip wheel" in i.value]
    assert len(compiled) == 3
    assert all("--no-cache-dir" in value and "type=cache" not in value for value in compiled)


@both
def test_health_check_and_command_name_files_of_the_image(platform: str) -> None:
    check = json.loads(last(platform, "HEALTHCHECK").partition("CMD ")[2])
    home = last(platform, "WORKDIR")
    assert check == ["python3", f"{home}/docker/healthcheck.py"]
    for word in [check[1].removeprefix(f"{home}/"), json.loads(last(platform, "CMD"))[1]]:
        assert (ROOT / word).is_file() and not is_ignored(word), word
    assert json.loads(last(platform, "ENTRYPOINT")) == ["tini", "--"]


@both
def test_labels_state_the_projects_version_and_licence(platform: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', last(platform, "LABEL")))
    assert labels["version"] == openrlhf_gtpo.__version__
    assert labels["licenses"] == "Apache-2.0"
    assert labels["revision"] == "${REVISION}" and labels["title"] and labels["description"]


def test_runs_caches_and_repositories_stay_out_of_the_build() -> None:
    for path in (
        ".git/config",
        ".venv/bin/python",
        ".setup_env.lock",
        ".cache/quickstart/model.safetensors",
        "runs/smoke/metrics.jsonl",
        "wandb/latest-run",
        "core.1234",
        "notes.txt",
        ".env",
        "openrlhf_gtpo/__pycache__/x.pyc",
        "openrlhf_gtpo/megatron/__pycache__/x.pyc",
        "openrlhf_gtpo.egg-info/PKG-INFO",
    ):
        assert is_ignored(path), path


def test_everything_that_runs_is_let_into_the_build() -> None:
    files = [
        path
        for room in ("openrlhf_gtpo", "examples", "requirements", "tests", "benchmarks/suite")
        for path in (ROOT / room).rglob("*")
    ]
    kept = [str(path.relative_to(ROOT)) for path in files if path.is_file() and "__pycache__" not in path.parts]
    assert len(kept) > 200
    for path in [*kept, "setup.py", "pyproject.toml", "LICENSE", "README.md", "benchmarks/gpu/run_all.sh"]:
        assert not is_ignored(path), path


# --- docker/build_cpu_without_registry.sh ---

BUILD = ROOT / "docker" / "build_cpu_without_registry.sh"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speed"], "unknown argument --speed; known: --check --storage"),
        (["--tag"], "--tag needs a value"),
        (["--pip-config", "/nowhere/pip.conf"], "--pip-config /nowhere/pip.conf is not a file"),
        (["--volume", "/nowhere:/wheels"], "--volume /nowhere:/wheels: /nowhere does not exist"),
        ([], "was not found; install it (Debian: apt-get install"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_built(words: list[str], said: str, tmp_path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    ended = subprocess.run(
        ["/bin/bash", str(BUILD), *words], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("build_cpu_without_registry: ") and ended.stderr.count("\n") == 1
    assert said in ended.stderr


def test_help_is_the_files_own_header() -> None:
    ended = subprocess.run(["/bin/bash", str(BUILD), "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--storage DIR" in ended.stdout and not ended.stdout.startswith("#")
    assert ended.stdout.rstrip().endswith("docker-archive:cpu.tar")
