"""GTPO and GRPO-S for OpenRLHF, with a Megatron-core actor beside the DeepSpeed one.

Importing this package is free of side effects and of heavy imports; each room (`algorithms`, `lm_head`, `megatron`,
`rollout`, `integration`, `platform`, `report`, `cli`) brings in only what it needs.
"""

from openrlhf_gtpo._version import __version__

__all__ = ["__version__"]
