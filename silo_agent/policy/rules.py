"""The `[policy]` table of silo.toml: every key, its bounds and its default."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from lorica_security.console.strict_toml import Section
from silo_wire.manifest import MAX_NAME_CHARACTERS
from silo_wire.plans.sections.model import DigestText
from silo_wire.plans.sections.task import TaskName
from silo_wire.plans.work import MOST_WORK_RATIO

if TYPE_CHECKING:
    pass

LEAST_SILOS = 3
"""Of a cohort, a threshold or a sum: in a sum of two each sees the other."""
MOST_SILOS = 10_000


def _tensor_pattern(text: str) -> str:
    if not text or len(text) > MAX_NAME_CHARACTERS or not text.isprintable() or "*" in text[:-1]:
        raise ValueError("use a parameter's name, or the beginning of names followed by one '*'")
    return text


TensorPattern = Annotated[str, AfterValidator(_tensor_pattern)]
"""A parameter's name, or the beginning of names and a `*`."""
Silos = Annotated[int, Field(ge=LEAST_SILOS, le=MOST_SILOS)]


class PolicyRules(Section):
    """`[policy]` of silo.toml. The defaults allow any plan of an ordinary size of this federation; where masks are
    required, those that people approved."""

    max_parameters: Annotated[int, Field(ge=1)] = 1_000_000_000
    allowed_tensors: Literal["any"] | Annotated[list[TensorPattern], Field(min_length=1)] = "any"
    max_upload_bytes: Annotated[int, Field(ge=1)] = 4 << 30  # of one update, hence of one round
    max_rounds: Annotated[int, Field(ge=1)] = 10_000
    max_epochs: Annotated[int, Field(ge=1)] = 1_000  # of local training in one round
    require_secure_aggregation: bool = False
    approved_plans: Literal["any", "ask"] | Annotated[list[DigestText], Field(min_length=1)] = Field(
        default_factory=lambda given: "ask" if given.get("require_secure_aggregation") else "any"
    )
    # of round models under masks, before this silo trains from them
    verify: Literal["joint", "spot", "off"] = Field(
        default_factory=lambda given: "joint" if given.get("require_secure_aggregation") else "spot"
    )
    min_cohort: Silos = LEAST_SILOS
    min_threshold: Silos = LEAST_SILOS
    min_survivors: Silos = LEAST_SILOS
    smallest_group: Silos = LEAST_SILOS  # of a release group: silos that are in a masked sum together or not at all
    colluders: Annotated[int, Field(ge=0, le=MOST_SILOS)] = 0  # among the peers, that a sum must withstand
    max_work_ratio: Annotated[float, Field(ge=1, le=MOST_WORK_RATIO, allow_inf_nan=False)] = (
        1.0  # between silos, under masks; 1: all work alike
    )
    require_privacy: Literal["none", "record", "silo"] = "none"
    unit_field: Annotated[str, Field(max_length=100)] = ""  # what a private plan must group lines by; "": anything
    max_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0  # of all private rounds ever, over all plans
    # the same towards all other silos of a sum, if they worked against this one; 0: no plan whose noise silos make
    # together
    max_epsilon_alone: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # the dp_delta at which max_epsilon is counted
    # of one record's gradient under record-level privacy: far below what float32 resolves in trained parameters nothing
    # is learnt
    min_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    max_model_value: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e5  # of a round model's parameters, in size
    shared_budget: Annotated[str, Field(max_length=4096)] = ""  # registry of folders that train on the same records
    trust_on_first_use: bool = False  # pin the key that a peer comes with first; does not stop invented silos
    allow_execution: bool = True  # a model's SQL on the database of [database], always in the sandbox
    database_in_training: bool = False  # what that gives may decide what is trained on, and so leaves in updates
    tasks: list[TaskName] = Field(default_factory=list)  # that this silo's people installed, and let plans train for
    tell_scores: bool = True  # how many held-out questions a model answers right; false: nothing of that leaves
    smallest_evaluation: Annotated[int, Field(ge=2)] = 2  # held-out questions: scores of fewer tell of single records
