"""Audits of FP8's effect on the credit (``--megatron.fp8_audit_steps``)."""

from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.fp8_audit.settings import FP8_AUDIT, ask_for_forward


class FP8Audit(Feature):
    settings = FP8_AUDIT
    before = (ask_for_forward,)

    def is_on(self) -> bool:
        args = self.args
        in_fp8 = args.actor.backend == "megatron" and args.megatron.fp8 is not None
        return in_fp8 and args.rollout.entropy == "actor" and captures_entropy(args)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.fp8_audit.controller import FP8AuditInController

        return FP8AuditInController(self.args)
