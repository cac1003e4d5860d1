"""Images run as a user, copy what is there, keep no secret, and install no package again after a change of code."""

import re

import pytest

from tests.support.dockerfiles import DOCKERFILES, instructions, is_ignored

both = pytest.mark.parametrize("platform", DOCKERFILES)


@both
def test_no_package_lists_and_no_secrets_are_kept(platform: str) -> None:
    for name, value in instructions(platform):
        if name == "RUN" and "apt-get" in value:
            assert "rm -rf /var/lib/apt/lists/*" in value and "--no-install-recommends" in value
        if name in ("ARG", "ENV", "LABEL"):
            assert not re.search(r"(?i)token|password|secret|index.url|https?://", value), value
        if name == "RUN" and re.search(r"pip (install|wheel)", value):
            assert "--no-index" in value or "--mount=type=secret,id=pip_conf,target=/etc/pip.conf" in value


def test_a_compiled_wheel_never_comes_from_a_cache() -> None:
    """pip's cache does not know which torch a wheel was compiled against."""
    compiled = [i.value for i in instructions("cuda") if i.name == "RUN" and "pip wheel" in i.value]
    assert len(compiled) == 3
    assert all("--no-cache-dir" in value and "type=cache" not in value for value in compiled)


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
