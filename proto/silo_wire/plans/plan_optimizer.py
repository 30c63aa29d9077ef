"""The server optimizer that a plan asks for."""

from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.server_step.server_optimizer import ServerOptimizer, optimizer_named


def optimizer_of(section: AggregationSection) -> ServerOptimizer:
    """Raises ConfigurationError for a value outside its range."""
    return optimizer_named(
        section.server_optimizer,
        learning_rate=section.server_learning_rate,
        momentum=section.momentum,
        beta1=section.beta1,
        beta2=section.beta2,
        tau=section.tau,
    )
