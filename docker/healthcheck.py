"""Is everything that an image should hold installed at its locked version, and does all of it import?

The images' HEALTHCHECK, and by hand in any environment:

    python3 docker/healthcheck.py                    versions, packages, every module of this project
    python3 docker/healthcheck.py --packages-only    without the project: the layer of an image under it

Exit status 0 with one line that says what was found, or 1 with a line for each thing that is wrong. Needs no GPU: on a
host without one the packages of a CUDA image import too, and the line says that no GPU is visible.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What a run imports. Without flash-attn, flash_attn is the project's own stand-in.
PACKAGES = (
    "torch",
    "transformers",
    "ray",
    "vllm",
    "deepspeed",
    "datasets",
    "peft",
    "megatron.core",
    "math_verify",
)
# Compiled for CUDA; an environment may do without them, and then with all modules that they bring.
KERNELS = {
    "flash-attn": ("flash_attn", "flash_attn_2_cuda"),
    "transformer-engine": ("transformer_engine.pytorch",),
    "transformer-engine-cu13": (),
    "transformer-engine-torch": ("transformer_engine_torch",),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages-only", action="store_true", help="do not look at the project's own modules")
    packages_only = parser.parse_args(arguments).packages_only
    started = time.monotonic()
    sys.path.insert(0, str(ROOT))

    # A missing or broken torch is the first thing that an image gets wrong, and the platform is read from it.
    problems = list(import_problems(["torch"]))
    if problems:
        return report(problems)
    import torch

    platform = "cpu" if torch.version.cuda is None else "cuda"
    os.environ.setdefault("OPENRLHF_GTPO_PLATFORM", platform)
    if not packages_only:
        from openrlhf_gtpo.platform import activate

        activate()  # before DeepSpeed, which chooses its accelerator on import
    lock = ROOT / "requirements" / f"{platform}.lock"
    locked = locked_versions(lock.read_text(encoding="utf-8"))
    left_out = [name for name in KERNELS if name in locked and not is_installed(name)]
    locked = {name: version for name, version in locked.items() if name not in left_out}
    problems += version_problems(locked, lock.name)
    of_kernels = [module for name in KERNELS if name in locked for module in KERNELS[name]]
    problems += import_problems([*PACKAGES, *of_kernels])
    found = f"{len(locked)} packages of {lock.name}"
    if left_out:
        found += f" (without {', '.join(left_out)})"
    if not packages_only:
        modules = project_modules(ROOT / "openrlhf_gtpo")
        problems += project_problems(modules)
        found += f", {len(modules)} modules of the project"
    if problems:
        return report(problems)
    gpus = torch.cuda.device_count() if platform == "cuda" else 0
    print(f"healthy: {found}, torch {torch.__version__}, {gpus} GPUs visible, {time.monotonic() - started:.0f} s")
    return 0


def report(problems: list[str]) -> int:
    """Print each problem on a line of its own; the exit status that Docker reads as unhealthy."""
    for problem in problems:
        print(f"unhealthy: {problem}", file=sys.stderr)
    return 1


def locked_versions(lock: str) -> dict[str, str]:
    """Name to version of the ``name==version`` lines of a lock file."""
    lines = (line.split(";")[0].strip() for line in lock.splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def is_installed(package: str) -> bool:
    """True if the package has metadata here."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def version_problems(locked: dict[str, str], lock_name: str) -> Iterator[str]:
    """A sentence for each locked package that is missing, or installed at another version."""
    for name, version in locked.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed; {lock_name} has {version}."
            continue
        # PyPI's CUDA build of torch calls itself 2.13.0+cu130 and is published as 2.13.0.
        wanted = installed if "+" in version else installed.split("+")[0]
        if wanted != version:
            yield f"{name} {installed} is installed; {lock_name} has {version}."


def project_modules(package: Path) -> list[str]:
    """Dotted names of every module under a package's folder, without importing any."""
    names = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def project_problems(modules: Iterable[str]) -> Iterator[str]:
    """What is wrong with OpenRLHF for this project, and with the project's own modules."""
    from openrlhf_gtpo.errors import UsageError
    from openrlhf_gtpo.training.settings import guard

    try:
        guard.check_openrlhf()
    except UsageError as error:
        yield str(error)
    yield from import_problems(modules)


def import_problems(modules: Iterable[str]) -> Iterator[str]:
    """A sentence for each module that does not import. What libraries say on import is kept back."""
    for name in modules:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                importlib.import_module(name)
        except BaseException as error:  # a library may exit, and a broken extension raise anything
            first_line = re.sub(r"\s+", " ", str(error)).strip()[:300]
            yield f"import {name} raises {type(error).__name__}: {first_line}"


if __name__ == "__main__":
    sys.exit(main())
