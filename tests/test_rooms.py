"""These tests catch a room that imports what it must not: cli -> training -> {weight_sync, algorithms, lm_head},
never back, and ``tools/*`` only from cli. That keeps an OpenRLHF upgrade inside ``training`` and lets the mathematics
run anywhere.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features import FEATURES, Dumps
from openrlhf_gtpo.training.settings.flags import DERIVED

PACKAGE = Path(__file__).resolve().parents[1] / "openrlhf_gtpo"

# Heavy libraries, by the names under which they land in sys.modules.
HEAVY = {"openrlhf", "ray", "vllm", "megatron", "transformer_engine", "transformers", "deepspeed", "peft"}
HEAVY |= {"flash_attn", "datasets", "torch"}

# Those of them that importing a whole room may bring in.
MAY_BRING_IN = {
    "algorithms": {"torch"},
    "lm_head": {"torch"},
    "lora": {"torch"},
    "shared_prompts": {"torch"},
    "checkpoints": {"torch"},
    "megatron": {"torch", "megatron", "transformers", "transformer_engine"},
    "weight_sync": {"torch", "ray", "vllm"},
    "platform": {"torch"},
    "tasks": {"torch", "transformers", "datasets"},
    "report": set(),
    "tools/view": {"torch"},
    "tools/planner": set(),
    "tools/launch": set(),
    "tools/experiment": set(),
}
# What a driver asks before it imports anything heavy; a wrong flag is reported before OpenRLHF is imported.
ASKED = ("openrlhf_gtpo", "openrlhf_gtpo.megatron.parallel.layout", "openrlhf_gtpo.cli.plan")
ASKED += ("openrlhf_gtpo.training.settings.guard", "openrlhf_gtpo.training.settings.megatron_overrides")

# Rooms of this package that a room's sources may import. Every room may import its own.
MAY_KNOW = {
    "algorithms": set(),
    "lm_head": set(),
    "lora": set(),
    "checkpoints": {"platform"},
    "shared_prompts": {"platform"},
    "megatron": {"checkpoints", "lm_head", "lora", "platform", "shared_prompts"},
    "weight_sync": set(),
    "platform": set(),
    "report": set(),
    "tasks": {"platform"},
    "training": {"algorithms", "checkpoints", "lm_head", "lora", "megatron", "weight_sync", "platform", "report"}
    | {"shared_prompts"},
    "scoring": {"training", "megatron", "platform"},
    "tools/view": {"algorithms", "report"},
    "tools/planner": {"lm_head", "megatron", "report"},  # only arithmetic, which does not import torch either
    "tools/launch": set(),
    "tools/experiment": {"platform", "report", "tools/launch"},
    "cli": {"training", "scoring", "platform", "report", "tasks", "algorithms", "lm_head", "megatron"}
    | {"checkpoints", "lora", "tools/planner", "tools/launch", "tools/view", "tools/experiment", "tools/doctor"},
}
MAY_NAME_OPENRLHF = {"training", "scoring", "cli"}

# Rooms within a room: each may import those before it.
INNER = {
    "megatron": ("parallel", "fp8", "model", "train", "checkpoint"),
    "training": ("credit", "settings", "checks", "rollout", "actors", "controller", "features"),
}
# The files beside them that all of them may import, and which import none of them; the others import the rooms, and no
# room may import those.
BESIDE = {"megatron": {"families"}, "training": {"arguments", "rows", "feature", "host", "step"}}
# What has something of every feature, from their list: a command line has all flags, and a run those that are on.
COMPOSES = {"training/settings/flags.py", "training/settings/rules.py", "training/run.py"}
# What has something of one feature: vLLM is given one class for its workers, by name, and an evaluation shows the
# entropies of that class's sampler.
OF_SAMPLER = {"training/rollout/worker_extension.py", "scoring/answers.py"}


def rooms() -> list[str]:
    folders = sorted(path.parent for path in [*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("tools/*/__init__.py")])
    return [str(folder.relative_to(PACKAGE)) for folder in folders if folder != PACKAGE / "tools"]


def room_of(parts: Sequence[str]) -> str:
    """The room of a module of this package, by the parts of its full name."""
    return "/".join(parts[1:3]) if parts[1] == "tools" else parts[1]


def modules(room: str) -> list[str]:
    names = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def imported(path: Path, types: bool = True) -> Iterator[tuple[str, int]]:
    """Yield the full names that a source file imports, even inside functions, and their line numbers.

    Args:
        types: also what is imported only to name types.
    """
    package = path.relative_to(PACKAGE.parent).parent.parts
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.slow
def test_imports_bring_in_no_more_than_they_may() -> None:
    """In one process: what may bring in more comes later, and what differs in that has a child of its own."""
    steps = [(*ASKED, set()), ("openrlhf_gtpo.cli.train_ppo_ray", {"torch"})]
    steps += [(*modules(room), may) for room, may in MAY_BRING_IN.items()]
    steps.sort(key=lambda step: len(step[-1]))
    program = f"""
import importlib, os, sys
for *names, may in {steps!r}:
    if child := len(may) > 1 and os.fork():
        assert os.waitpid(child, 0)[1] == 0, names[0]
        continue
    for name in names:
        importlib.import_module(name)
        found = {{module.split(".")[0] for module in sys.modules}} & {HEAVY!r}
        assert found <= may, f"{{name}} brings in {{found - may}}"
    if len(may) > 1:
        os._exit(0)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENRLHF_GTPO", "DS_ACCELERATOR"))}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=PACKAGE.parent, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("room", rooms())
def test_a_room_names_only_rooms_below_it(room: str) -> None:
    known = MAY_KNOW[room] | {room}
    wrong = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name, line in imported(path):
            parts = name.split(".")
            is_ours = parts[0] == PACKAGE.name and len(parts) > 1 and (PACKAGE / parts[1]).is_dir()
            if is_ours and room_of(parts) not in known:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} {name}")
            if parts[0] == "openrlhf" and room not in MAY_NAME_OPENRLHF:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    assert not wrong


@pytest.mark.parametrize("room", INNER)
def test_an_inner_room_names_only_those_before_it(room: str) -> None:
    assert {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")} == set(INNER[room])
    wrong = []
    for place, inner in enumerate(INNER[room]):
        known = {*INNER[room][: place + 1], *BESIDE[room]}
        for path in sorted((PACKAGE / room / inner).rglob("*.py")):
            for name, line in imported(path):
                parts = name.split(".")
                if parts[:2] != [PACKAGE.name, room] or parts[2] in known:
                    continue
                if str(path.relative_to(PACKAGE)) not in COMPOSES | OF_SAMPLER:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line} {name}")
    assert not wrong


@pytest.mark.parametrize(("room", "file"), [(room, file) for room, files in BESIDE.items() for file in sorted(files)])
def test_a_file_that_all_inner_rooms_know_knows_none_of_them(room: str, file: str) -> None:
    own = [PACKAGE.name, room]
    found = [name.split(".") for name, _ in imported(PACKAGE / room / f"{file}.py", types=False)]
    assert not [parts for parts in found if parts[:2] == own and parts[2] not in BESIDE[room]]


def test_features_know_no_other_and_are_known_by_their_list() -> None:
    features, knowing = f"{PACKAGE.name}.training.features", {}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = ".".join(path.relative_to(PACKAGE.parent).parts[:4])
        for name, _ in imported(path):
            if name.startswith(features) and not name.startswith((f"{own}.", f"{features}.FEATURES")):
                knowing.setdefault(str(path.relative_to(PACKAGE)), set()).add(name.split(".")[3])
    assert knowing.pop("training/features/__init__.py") == {kind.__module__.split(".")[3] for kind in FEATURES}
    assert knowing == dict.fromkeys(OF_SAMPLER, {"sampler_entropy"})


def test_upstreams_copy_of_the_arguments_is_read_at_the_seam_alone() -> None:
    """A run's arguments are frozen and typed (``arguments.py``); upstream's code has a namespace made of them."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in sources.items() if re.search(r"\bstrategy\.args\b", text)} == {
        "training/credit/advantages.py"  # around upstream's estimators
    }
    assert {name for name, text in sources.items() if re.search(r"\bthaw\b", text)} == {
        "training/run.py",
        "training/settings/frozen.py",
    }


def test_no_hook_on_a_module_changes_what_trains() -> None:
    """The loss is a function: what it reads is in its inputs (``LossInputs``). Megatron's room counts its passes."""
    rooms_without = {path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "megatron"}
    assert not [str(path) for path in rooms_without if re.search(r"register_\w*hook", path.read_text())]


@pytest.mark.parametrize(
    "room",
    ["algorithms", "lm_head", "weight_sync", "checkpoints", "platform", "megatron", "training"]
    + ["scoring", "tasks", "report"],
)
def test_what_trains_does_not_know_what_stands_beside_it(room: str) -> None:
    """Planner, viewer, experiments, launcher, doctor and benchmarks can change without a look at the core."""
    sources = sorted((PACKAGE / room).rglob("*.py"))
    names = [(path, line, name) for path in sources for name, line in imported(path)]
    assert names
    assert not [found for found in names if f"{found[2]}.".startswith(("openrlhf_gtpo.tools.", "benchmarks."))]


@pytest.mark.parametrize("kind", FEATURES)
def test_a_feature_is_named_in_its_folder_alone(kind: type[Feature]) -> None:
    """So are its flags; what the core asks of them is in ``DERIVED``. Readers of dumps say who writes them."""
    own = [setting.flag for setting in kind.settings.settings if setting.flag not in DERIVED]
    if not own:
        pytest.skip("its flags are OpenRLHF's")
    sections = {flag.rpartition(".")[0] if flag.count(".") > 1 else flag for flag in own}
    named = re.compile("|".join(rf"\b{re.escape(section)}\b" for section in sorted(sections)))
    folder = PACKAGE.parent.joinpath(*kind.__module__.split("."))
    naming = {path for path in PACKAGE.rglob("*.py") if folder not in path.parents and named.search(path.read_text())}
    readers = {"report/rollouts.py", "cli/view.py"} if kind is Dumps else set()
    assert {str(path.relative_to(PACKAGE)) for path in naming} == readers


def test_tests_change_and_import_no_private_name() -> None:
    """Of this project: those of the libraries that it stands on are changed where they offer nothing else."""
    upstreams = {"_fetch_rewards_via_http"}  # which a class of ours has too
    private = re.compile(
        r"^(?:(?:async )?def|class) (_[a-z]\w*)|^(_[A-Z]\w*)(?:: [^=]+)? =|^    (?:async )?def (_[a-z]\w*)", re.M
    )
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "benchmarks").rglob("*.py")]
    ours = {name for path in sources for names in private.findall(path.read_text()) for name in names if name}
    wrong = []
    for path in sorted((PACKAGE.parent / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "object"):
                named = [word.value for word in node.args if isinstance(word, ast.Constant)]
                names = {str(name).split(".")[-1] for name in named}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                PACKAGE.name,
                "benchmarks",
            ):
                names = {alias.name for alias in node.names}
            else:
                continue
            wrong += [f"{path.name}:{node.lineno} {name}" for name in sorted(names & ours - upstreams)]
    assert not wrong
