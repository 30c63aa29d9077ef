"""What this silo refuses, whatever the coordinator says. Each refusal is a PolicyRefusal that names the rule.

The rules are the `[policy]` table of silo.toml: limits, approvals, and whether the silo's database may be queried. They
are checked before a plan is answered and again before bytes leave.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from security.errors import PolicyRefusal
from security.identifiers import SiloName
from silo_wire.manifest import Manifest
from silo_wire.plan import DigestText, PlanBundle
from silo_wire.strict_toml import Section


class PolicyRules(Section):
    """`[policy]` of silo.toml. The defaults allow any plan of an ordinary size of this federation."""

    approved_plans: Literal["any"] | Annotated[list[DigestText], Field(min_length=1)] = "any"
    max_parameters: Annotated[int, Field(ge=1)] = 1_000_000_000
    max_upload_bytes: Annotated[int, Field(ge=1)] = 4 << 30  # of one update, hence of one round
    max_rounds: Annotated[int, Field(ge=1)] = 10_000
    max_epochs: Annotated[int, Field(ge=1)] = 1_000  # of local training in one round
    allow_execution: bool = True  # a model's SQL on the database of [database], always in the sandbox


@dataclass(frozen=True, slots=True)
class SiloPolicy:
    """The rules as they bind one silo."""

    rules: PolicyRules
    silo: SiloName

    def check_plan(self, bundle: PlanBundle) -> None:
        """Raises PolicyRefusal unless every rule allows this plan."""
        rules, plan = self.rules, bundle.plan
        if rules.approved_plans != "any" and plan.digest not in rules.approved_plans:
            raise PolicyRefusal(
                "approved_plans",
                f"plan {plan.name} with digest {plan.digest} is not approved here: "
                "add the digest to [policy] approved_plans of silo.toml and restart the agent",
            )
        _within("max_parameters", "parameters of the model", plan.model.parameters, rules.max_parameters)
        _within("max_upload_bytes", "bytes of an update", bundle.update_layout.total_bytes, rules.max_upload_bytes)
        _within("max_rounds", "rounds", plan.schedule.rounds, rules.max_rounds)
        _within("max_epochs", "epochs in a round", plan.training.for_silo(self.silo).epochs, rules.max_epochs)

    def check_upload(self, manifest: Manifest) -> None:
        """Raises PolicyRefusal when an update is larger than may leave in one round."""
        _within("max_upload_bytes", "bytes of an update", manifest.total_bytes, self.rules.max_upload_bytes)

    def check_execution(self) -> None:
        """Raises PolicyRefusal unless a model's SQL may run on this silo's database."""
        if not self.rules.allow_execution:
            raise PolicyRefusal(
                "allow_execution",
                "queries on this silo's database are not allowed: set [policy] allow_execution = true in silo.toml",
            )


def _within(rule: str, what: str, asked: int, most: int) -> None:
    if asked > most:
        raise PolicyRefusal(
            rule, f"the plan asks for {asked} {what}, [policy] {rule} of this silo allows {most}: change one of them"
        )
