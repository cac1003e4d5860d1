"""Optional features of a run, one folder each; see ``feature.py``. Importing this imports nothing heavy."""

from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features.dumps import Dumps, Replay
from openrlhf_gtpo.training.features.fp8_audit import FP8Audit
from openrlhf_gtpo.training.features.guide import GuidingPolicy
from openrlhf_gtpo.training.features.lora import Lora
from openrlhf_gtpo.training.features.routing_replay import RoutingReplay
from openrlhf_gtpo.training.features.sampler_entropy import SamplerEntropy
from openrlhf_gtpo.training.features.spikes import SpikeWatch

# All features, in the order of their settings and of their hooks' calls. The first decides whether anything is
# sampled; the last sees what the others have logged.
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
