"""The plan: what the operator asks of a federation, and what a silo approves. Identified by its digest.

A plan is values alone: no code, no paths, no secrets. The operator edits it as TOML (`plan.toml`); it travels inside a
plan bundle as canonical JSON, whose BLAKE3 digest is the plan's name everywhere. The digests of the model's
configuration, tokenizer, parameter layout and initial parameters are part of it, so the one digest covers them all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, Self

from google.protobuf.message import DecodeError
from pydantic import ValidationError, model_validator

from lorica_security.console.strict_toml import describe, parse_toml
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.manifest import Layout, masked_layout
from silo_wire.plans.adapters import AdaptersSection, Pair, Turns, adapter_layout, fixed_layout, pairs_of
from silo_wire.plans.contradictions.sections import contradictions_of
from silo_wire.plans.model_files import MOST_BYTES, parsed, refuse_code
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE
from silo_wire.plans.work import MOST_SETTINGS, MOST_WORK_RATIO, widest_gap
from silo_wire.v1 import federation_pb2

MAX_BUNDLE_BYTES = 64 << 20
_MOST_LAYOUT_BYTES = 32 << 20
"""Of a layout; one of 100,000 tensors has some 6 million."""

_LATER_KEYS: Final = {
    "aggregation": frozenset(
        {
            *("step_length", "fairness", "reducer", "trimmed_share", "hostile_silos", "clipping_radius"),
            *("reduction_memory", "server_rate_at_end"),
        }
    ),
    "schedule": frozenset({"cohort_size"}),
    "task": frozenset({"score", "version", "digest"}),
    "training": frozenset({"steps", "drift_correction", "gradient_checkpointing", "length_grouping"}),
}
_LATER_SECTIONS: Final = ("task", "semi_supervised")


class Plan(PlanValues):
    """A plan whose sections go together, by its digest."""

    @model_validator(mode="after")
    def _sections_go_together(self) -> Self:
        """Whatever does not is named at once: who mends one finds no next."""
        if wrong := "; ".join(contradictions_of(self)):
            raise ValueError(wrong)
        return self

    def to_json(self) -> bytes:
        """In canonical form. A key of `_LATER_KEYS` is left out where it has its default, and one of `_LATER_SECTIONS`
        where all of it has, so that plans made since `training.loss_reduction` came, which is always written, keep
        their digests."""
        values = self.model_dump(mode="json")
        for section in _LATER_SECTIONS:
            if getattr(self, section) == type(self).model_fields[section].default:
                del values[section]
        for section, keys in _LATER_KEYS.items():
            if section not in values:
                continue
            defaults = type(getattr(self, section)).model_fields
            values[section] = {
                key: value
                for key, value in values[section].items()
                if key not in keys or value != defaults[key].default
            }
        return canonical_json(values)

    @cached_property
    def digest(self) -> Digest:
        return digest_of(self.to_json())

    @classmethod
    def from_json(cls, raw: bytes) -> "Plan":
        """Parse a peer's plan; raises MalformedMessage naming the key, also when the JSON is not canonical."""
        try:
            plan = cls.model_validate(json.loads(raw))
        except ValidationError as error:
            raise MalformedMessage(f"plan: {describe(error)}") from error
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"plan is not JSON: {error}") from error
        if plan.to_json() != raw:
            raise MalformedMessage("plan is not in canonical form: its digest would not be unique")
        return plan

    @classmethod
    def from_toml(cls, text: str, where: str) -> "Plan":
        """Parse an operator's plan file; raises ConfigurationError naming `where`, the key, the value and the
        remedy."""
        plan = parse_toml(cls, text, where)
        plan.require_comparable_work(where)
        return plan

    def require_comparable_work(self, where: str) -> None:
        """Raise ConfigurationError for overrides that no silo takes under masks; the silos look for themselves,
        whatever comes."""
        if not self.aggregation.secure_aggregation or not self.training.overrides:
            return
        gap = widest_gap(self.training.works)
        if gap is None:
            raise ConfigurationError(
                f"{where}: [training.overrides] have more than {MOST_SETTINGS} different settings, which does not "
                "go with [aggregation] secure_aggregation = true: give silos the same ones, or set secure_aggregation "
                "to false"
            )
        if gap.ratio > MOST_WORK_RATIO:
            raise ConfigurationError(
                f"{where}: {gap.first} and {gap.second} differ {float(gap.ratio):.3g}-fold in learning rate x "
                "optimizer steps, which does not go with [aggregation] secure_aggregation = true: where one silo "
                f"trains so much more than the others, the sum is its delta, and no silo allows more than "
                f"{MOST_WORK_RATIO:g}-fold; bring the overrides together, or set secure_aggregation to false"
            )


class PlanOfAnotherRelease(StateError):
    """A plan that was kept as it was made, and that this release does not read: nothing more is done under it."""


@dataclass(frozen=True)
class PlanBundle:
    """A plan with the files that its digests name: all that a silo needs to know before the model itself."""

    plan: Plan
    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        expected = self.plan.model.files
        if set(self.files) != set(expected):
            raise MalformedMessage(f"plan bundle holds {sorted(self.files)}, its plan names {sorted(expected)}")
        for name, content in self.files.items():
            if digest_of(content) != expected[name]:
                raise IntegrityError(f"plan bundle file {name} does not have the digest in the plan: it was changed")
            if name.endswith(".json"):
                refuse_code(name, parsed(content, name, MOST_BYTES.get(name, _MOST_LAYOUT_BYTES)))
        model = self.plan.model
        if self.layout.digest != model.layout or self.layout.parameters != model.parameters:
            raise MalformedMessage(
                "plan bundle layout.json does not agree with [model] layout and parameters of the plan"
            )
        if self.base_layout is not None:
            _require_adapters(self.layout, self.base_layout, self.plan.adapters)

    @cached_property
    def layout(self) -> Layout:
        """The parameters as they are computed with, in float32."""
        return Layout.from_json(self.files[LAYOUT_FILE])

    @cached_property
    def base_layout(self) -> Layout | None:
        """The parameters that stay, in float32, where adapters are trained."""
        return Layout.from_json(self.files[BASE_LAYOUT_FILE]) if BASE_LAYOUT_FILE in self.files else None

    @cached_property
    def fixed_layout(self) -> Layout | None:
        """Those of the adapters that the plan's seed makes and nobody trains, in float32, where there are any."""
        return None if self.base_layout is None else fixed_layout(self.base_layout, self.plan.adapters)

    @cached_property
    def turns(self) -> Turns:
        """What of the parameters rests in which round."""
        return Turns.of(self.layout, self.plan.adapters)

    @property
    def reprojected(self) -> tuple[Pair, ...]:
        """The adapters whose products are averaged; none where the plan averages parameters."""
        return pairs_of(self.layout) if self.plan.adapters.reprojects else ()

    @property
    def whole_layout(self) -> Layout:
        """The parameters of the T5 itself, which config.json makes."""
        return self.base_layout or self.layout

    @property
    def parameters_in_memory(self) -> int:
        """Of the model with its adapters."""
        return sum(each.parameters for each in (self.layout, self.base_layout, self.fixed_layout) if each)

    def teacher_bytes(self, silo: str) -> int:
        """In memory while this silo trains: what is trained once more, in float32, where a teacher answers its
        questions."""
        section = self.plan.semi_supervised
        taught = section.without_labels(silo) and section.teacher in ("ema", "round")
        return self.layout.total_bytes if taught else 0

    @cached_property
    def model_layout(self) -> Layout:
        """The layout of the models that silos are handed."""
        return self.layout.as_type(self.plan.wire.model)

    @cached_property
    def update_layout(self) -> Layout:
        """The layout of the updates that silos send."""
        return self.layout.as_type(self.plan.wire.update)

    @property
    def update_bytes(self) -> int:
        """What one update takes on the wire and in the coordinator's spool: `update_layout`'s numbers, or the masked
        vector's words."""
        if not self.plan.aggregation.secure_aggregation:
            return self.update_layout.total_bytes
        # Here, not above: numpy, which it brings, is for plans with masks alone.
        from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS

        return masked_layout(self.layout.parameters + EXTRA_WORDS).total_bytes

    def encode(self) -> bytes:
        message = federation_pb2.PlanBundle(plan_json=self.plan.to_json())
        for name in sorted(self.files):
            message.files.add(name=name, content=self.files[name])
        return message.SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, raw: bytes, expected: Digest) -> "PlanBundle":
        """Parse what FetchPlan delivered; raises IntegrityError unless its plan has the digest `expected`."""
        if len(raw) > MAX_BUNDLE_BYTES:
            raise MalformedMessage(f"plan bundle has {len(raw)} bytes, allowed are {MAX_BUNDLE_BYTES}")
        message = federation_pb2.PlanBundle()
        try:
            message.ParseFromString(raw)
        except DecodeError as error:
            raise MalformedMessage(f"plan bundle does not parse: {error}") from error
        if digest_of(message.plan_json) != expected:
            raise IntegrityError("plan bundle does not have the digest that was asked for: it was changed on the way")
        names = [file.name for file in message.files]
        if len(set(names)) != len(names):
            raise MalformedMessage(f"plan bundle names a file twice: {names}")
        return cls(Plan.from_json(message.plan_json), {file.name: file.content for file in message.files})

    @staticmethod
    def is_of_another_release(raw: bytes, expected: Digest) -> bool:
        """Whether `raw`, which does not decode, is whole, and its plan one that this release does not read."""
        message = federation_pb2.PlanBundle()
        try:
            message.ParseFromString(raw)
            if digest_of(message.plan_json) == expected:
                Plan.from_json(message.plan_json)
        except DecodeError:
            return False
        except MalformedMessage:
            return True
        return False


def _require_adapters(layout: Layout, base: Layout, section: AdaptersSection) -> None:
    if base.dtype != "float32":
        raise MalformedMessage(f"plan bundle {BASE_LAYOUT_FILE} has dtype {base.dtype}: only float32 is taken")
    try:
        expected = adapter_layout(base, section)
    except ConfigurationError as error:
        raise MalformedMessage(str(error)) from error
    if layout != expected:
        raise MalformedMessage(
            f"plan bundle {LAYOUT_FILE} is not that of the [adapters] of a model of {BASE_LAYOUT_FILE}"
        )
