"""What a run may do besides training, a folder each; see ``feature.py``. Importing this imports nothing heavy."""

from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features.dumps import Dumps, Replay
from openrlhf_gtpo.training.features.fp8_audit import FP8Audit
from openrlhf_gtpo.training.features.guide import GuidingPolicy
from openrlhf_gtpo.training.features.lora import Lora
from openrlhf_gtpo.training.features.routing_replay import RoutingReplay
from openrlhf_gtpo.training.features.sampler_entropy import SamplerEntropy
from openrlhf_gtpo.training.features.spikes import SpikeWatch

# All features, in the order in which their settings are read and their hooks are called: the first one says whether
# anything is sampled at all, the last one sees what the others have logged.
FEATURES: tuple[type[Feature], ...] = (
    Replay,
    SamplerEntropy,
    RoutingReplay,
    Lora,
    FP8Audit,
    GuidingPolicy,
    Dumps,
    SpikeWatch,
)
