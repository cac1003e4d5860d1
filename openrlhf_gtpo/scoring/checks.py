"""What can be known to fail in ``cli.score`` before a process starts, apart from the lines of its input."""

import math
from pathlib import Path

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.checks import check_model, refuse_own_code
from openrlhf_gtpo.megatron.fp8.options import check_fp8
from openrlhf_gtpo.megatron.parallel.layout import LayoutError, ModelError, WorldSizeError, check_layout
from openrlhf_gtpo.megatron.train.overrides import OverrideError, parse_overrides
from openrlhf_gtpo.scoring.models import ScoreModel
from openrlhf_gtpo.scoring.rows import RowFile


def check(model: ScoreModel, source: Path, target: Path, processes: int) -> RowFile:
    """The input, to be read with the vocabulary and the longest sequence of the model.

    Raises:
        UsageError: the first thing that cannot work.
    """
    if model.max_tokens < 1:
        raise UsageError(f"--max-tokens {model.max_tokens} leaves no room for a token; give at least 1.")
    if not (model.temperature > 0 and math.isfinite(model.temperature)):
        raise UsageError(f"--temperature {model.temperature:g} gives no probabilities; give a value above 0.")
    if processes < 1:
        raise UsageError(f"Expected --processes >= 1, got {processes}.")
    if not source.is_file():
        raise UsageError(f"--input {source} {'is a folder' if source.is_dir() else 'does not exist'}; give a file.")
    if target.is_dir():
        raise UsageError(f"--output {target} is a folder; name a file in it.")
    if not target.parent.is_dir():
        raise UsageError(f"--output {target}: the folder {target.parent} does not exist; create it first.")
    if not Path(model.folder).is_dir():
        raise UsageError(f"--model {model.folder} is not a folder; download the checkpoint and give the path to it.")
    if not model.trust_remote_code:
        refuse_own_code(model.folder, "--model", "--trust-remote-code")
    config = check_model(model.folder, "--model", model.trust_remote_code)
    if hasattr(config, "vision_config"):
        raise UsageError(f"--model {model.folder} is a vision-language model; give a text model.")
    if model.backend == "megatron":
        _check_megatron(model, config, processes)
    max_length = getattr(config, "max_position_embeddings", None)
    return RowFile(source, model.folder, config.vocab_size, max_length, model.trust_remote_code)


def _check_megatron(model: ScoreModel, config: object, processes: int) -> None:
    if not any(Path(model.folder).glob("*.safetensors")):
        raise UsageError(
            f"--model {model.folder} has no *.safetensors files, the one format that --actor.backend megatron reads."
        )
    try:
        parse_overrides(model.overrides)
        cuda = platform.chosen_platform() == "cuda"
        check_layout(config, model.layout, processes, cuda=cuda)
        if model.fp8 is not None:
            check_fp8(model.fp8, config, model.layout, cuda=cuda)
    except WorldSizeError as error:
        raise UsageError(f"--processes {processes}: {error}") from error
    except ModelError as error:
        raise UsageError(f"--actor.backend megatron: {error}") from error
    except (LayoutError, OverrideError) as error:
        raise UsageError(str(error)) from error
