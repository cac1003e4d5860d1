"""What the planner refuses."""


class PlanError(ValueError):
    """A cluster, model, workload or layout that cannot be planned for; one sentence with what would do."""
