"""`[schedule]`, `[evaluation]` and `[wire]`: when rounds and scores are, and the types in which parameters travel."""

from typing import Annotated

from pydantic import Field

from lorica_security.console.strict_toml import Section
from silo_wire.manifest import ParameterDtype, UpdateDtype
from silo_wire.plans.sections.numbers import Count, Positive


class ScheduleSection(Section):
    """When rounds open and close. Each phase has one deadline; `min_silos` is the quorum of every one of them."""

    rounds: Count
    min_silos: Annotated[int, Field(ge=1, le=10_000)]
    cohort_size: Annotated[int, Field(ge=0, le=10_000)] = 0  # silos that are drawn for a round; 0: all that are ready
    start_when_ready: bool = False
    gathering_deadline_s: Positive = 60.0
    training_deadline_s: Positive = 3600.0
    masking_deadline_s: Positive = 600.0  # each phase of secure aggregation
    evaluation_deadline_s: Positive = 900.0


class WireSection(Section):
    """The types in which parameters travel. Coordinator and silos compute in float32 whatever they are."""

    model: ParameterDtype = "float32"
    update: UpdateDtype = "float32"  # else the silo keeps what rounding cut off and adds it to its next update


class EvaluationSection(Section):
    """When silos score the global model on their dev sets, and how much of them."""

    every: Annotated[int, Field(ge=0, le=1_000_000)] = 1  # rounds; 0: never
    initial: bool = True  # also before the first round
    last: bool = True  # also after the last round, whatever `every` says
    max_examples: Annotated[int, Field(ge=0)] = 0  # 0: the whole split
    batch_size: Count = 32
    beams: Annotated[int, Field(ge=1, le=64)] = 1
    execution: bool = True  # where a silo has a database and its policy allows it
