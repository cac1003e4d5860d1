"""The settings of the guide."""

from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import chosen_platform
from openrlhf_gtpo.training.host import CPU_MEMORY_SHARE, EngineGroup
from openrlhf_gtpo.training.settings.setting import SAMPLES, Bounds, Group, Ignored, Need, Setting, needs_flag

_GUIDE = Need(
    lambda values: values["algo.guide.model_name_or_path"] or not values["rollout.is_sampled"],
    "needs --algo.guide.fraction or --algo.guide.rescue_batch",
)
_ENGINES = Need(lambda values: not values["algo.guide.endpoint"], "--algo.guide.endpoint replaces the guide's engines")


def describe_guide(values: dict[str, Any], given: frozenset[str]) -> None:
    """Drop a guide without a task, refuse one without a name, and set what follows from it."""
    if values["algo.guide.endpoint"] == "":
        raise UsageError("Expected --algo.guide.endpoint to look like http://HOST:PORT/v1, got an empty string.")
    if not values["rollout.is_sampled"]:
        values |= {"algo.guide.fraction": 0.0, "algo.guide.rescue_batch": 0}
    asked = [name for name in ("fraction", "rescue_batch") if values[f"algo.guide.{name}"] > 0]
    if asked and not values["algo.guide.model_name_or_path"]:
        raise UsageError(f"--algo.guide.{asked[0]} needs a guide; give --algo.guide.model_name_or_path.")
    if not asked:
        values["algo.guide.model_name_or_path"] = None
    if values["algo.guide.gpu_memory_utilization"] is None:
        values["algo.guide.gpu_memory_utilization"] = values["vllm.gpu_memory_utilization"]
    if chosen_platform() == "cpu":  # the same small fraction of memory as for the policy's engines
        fraction = min(values["algo.guide.gpu_memory_utilization"], CPU_MEMORY_SHARE)
        values["algo.guide.gpu_memory_utilization"] = fraction
    if values["algo.guide.rescue_batch"]:
        values["rollout.joined_by"] = "--algo.guide.rescue_batch"
    if values["algo.guide.model_name_or_path"] and not values["algo.guide.endpoint"]:
        values["vllm.others"] = (
            EngineGroup(
                "--algo.guide",
                values["algo.guide.model_name_or_path"],
                values["algo.guide.num_engines"],
                values["algo.guide.tensor_parallel_size"],
                values["algo.guide.gpu_memory_utilization"],
                "serve it elsewhere and give --algo.guide.endpoint",
            ),
        )


GUIDE = Group(
    "guide",
    "a frozen, stronger policy that samples part of each group, or answers prompts whose responses were all wrong",
    (
        Setting(
            "algo.guide.model_name_or_path",
            None,
            "checkpoint of the guide: a frozen policy with the same tokenizer, which samples part of each group",
        ),
        Setting(
            "algo.guide.fraction",
            0.0,
            "fraction of each group's responses that the guide samples",
            bounds=Bounds(at_least=0, below=1),
        ),
        Setting(
            "algo.guide.steps",
            0,
            "training steps over which --algo.guide.fraction falls to 0; 0 keeps it constant",
            bounds=Bounds(at_least=0),
            needs=(needs_flag("algo.guide.fraction"),),
        ),
        Setting(
            "algo.guide.ratio_cap",
            2.0,
            "maximum ratio of policy to guide at a token that the guide sampled",
            bounds=Bounds(at_least=1),
        ),
        Setting(
            "algo.guide.rescue_batch",
            0,
            "have the guide answer prompts that dynamic filtering dropped because every response was wrong, once this "
            "many are waiting; 0 turns this off",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "algo.guide.rescue_weight",
            1.0,
            "loss weight of the groups that --algo.guide.rescue_batch adds",
            bounds=Bounds(at_least=0),
            needs=(needs_flag("algo.guide.rescue_batch"),),
        ),
        Setting(
            "algo.guide.endpoint",
            None,
            "OpenAI-compatible endpoint that serves the guide under its --algo.guide.model_name_or_path, instead of "
            "engines of this run; vllm serve opens one at http://HOST:8000/v1",
            metavar="URL",
        ),
        Setting(
            "algo.guide.num_engines", 1, "vLLM engines of the guide", bounds=Bounds(at_least=1), needs=(_ENGINES,)
        ),
        Setting(
            "algo.guide.tensor_parallel_size",
            1,
            "GPUs of each guide engine",
            bounds=Bounds(at_least=1),
            needs=(_ENGINES,),
        ),
        Setting(
            "algo.guide.gpu_memory_utilization",
            None,
            "fraction of GPU memory for each guide engine (default: --vllm.gpu_memory_utilization)",
            float,
            bounds=Bounds(above=0, at_most=1),
            needs=(_ENGINES,),
        ),
        Setting(
            "algo.guide.on_failure",
            "stop",
            "if the guide dies, stop the run or continue without it",
            choices=("stop", "continue"),
        ),
    ),
    needs=(_GUIDE,),
    ignored=(Ignored(("algo.guide.[!r]*", "algo.guide.rescue_*"), SAMPLES),),  # all but a ratio_cap for its rows
    page="guide.md",
)
