"""The plan and its bundle: what the operator mistypes, what a hostile coordinator tries."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Ranges
from lorica_security.secure_aggregation.parameters import Terms, least_survivors
from silo_wire.canonical import canonical_json, digest_of
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.v1 import federation_pb2
from tests.support.secagg_federation import ALONE, silo_names

LAYOUT = Layout("float32", (TensorSpec("w", (2, 2)),))
FILES = {"config.json": b'{"model_type":"t5"}', "layout.json": LAYOUT.to_json()}


def plan_value(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = {
        "version": 1,
        "name": "first",
        "federation": "north",
        "seed": 7,
        "model": {
            "source": "size:mini",
            "parameters": 4,
            "layout": LAYOUT.digest,
            "initial": "0" * 64,
            "files": {name: digest_of(content) for name, content in FILES.items()},
        },
        "schedule": {"rounds": 3, "min_silos": 2},
    }
    for path, new in changes.items():
        section, _, key = path.partition("__")
        if key:
            value.setdefault(section, {})[key] = new
        else:
            value[section] = new
    return value


def grouped_value(unit_field: str, **changes: Any) -> dict[str, Any]:
    """A plan with record-level privacy for all lines of one `unit_field`."""
    return plan_value(
        training__dropout=0.0,
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "record", "noise_multiplier": 1.0, "unit_field": unit_field},
        **changes,
    )


def toml_of(value: dict[str, Any]) -> str:
    def render(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f'"{key}" = {render(inner)}' for key, inner in item.items()) + "}"
        return json.dumps(item)

    return "\n".join(f"{key} = {render(item)}" for key, item in value.items())


def test_round_trip_and_digest() -> None:
    plan = Plan.from_toml(toml_of(plan_value()), "plan.toml")
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.digest == digest_of(plan.to_json())
    other = Plan.from_toml(toml_of(plan_value(schedule__rounds=4)), "plan.toml")
    assert other.digest != plan.digest


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainig": {}}, "unknown key trainig: remove it or correct its spelling"),
        ({"training__learning_rat": 1.0}, "unknown key training.learning_rat"),
        (
            {"training__learning_rate": -1.0},
            "training.learning_rate = -1.0: input should be greater than or equal to 0.0000001",
        ),
        ({"training__learning_rate": "fast"}, "training.learning_rate = 'fast': input should be a valid number"),
        ({"schedule__min_silos": 0}, "schedule.min_silos = 0: input should be greater than or equal to 1"),
        ({"schedule__rounds": 2.5}, "schedule.rounds = 2.5"),
        ({"aggregation__weighting": "lorax"}, "aggregation.weighting = 'lorax': input should be 'lorar'"),
        ({"aggregation__max_weight_share": 0.4}, r"max_weight_share = 0.4 cannot hold with min_silos = 2"),
        ({"schedule__cohort_size": 1}, r"cohort_size = 1 draws fewer silos than the 2 that a round needs: raise it"),
        ({"aggregation__momentum": 1.0}, "aggregation.momentum = 1.0"),
        ({"training__overrides": {"Not A Silo": {}}}, "'Not A Silo' is not a silo name"),
        ({"name": "Has Space"}, "name = 'Has Space': use 1 to 63"),
        ({"model__initial": "zz"}, "model.initial = 'zz'"),
        ({"model__files": {"config.json": "0" * 64}}, "layout.json is missing"),
        ({"version": 2}, "version = 2"),
        ({"wire__model": "uint32"}, "wire.model = 'uint32': input should be 'float32' or 'bfloat16'"),
        ({"wire__update": "uint32"}, "wire.update = 'uint32': input should be 'float32', 'bfloat16' or 'int8'"),
        ({"wire__model": "int8"}, "wire.model = 'int8': input should be 'float32' or 'bfloat16'"),
    ],
)
def test_a_malformed_plan_is_refused_naming_key_and_value(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_toml(toml_of(plan_value(**changes)), "plan.toml")
    assert says in str(caught.value)
    assert "plan.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


MASKS = {"schedule__min_silos": 4, "aggregation__secure_aggregation": True, "aggregation__max_weight": 100.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"schedule__min_silos": 2},
            "[schedule] min_silos = 2 is too few for secure aggregation, since a sum of two shows each the other: "
            "raise it to at least 3",
        ),
        (
            {"aggregation__max_weight_share": 0.5},
            "[aggregation] max_weight_share = 0.5 cannot be applied to masked updates, of which only the sum is "
            "seen: set it to 0",
        ),
        (
            {"aggregation__max_weight": 0.0},
            '[aggregation] max_weight = 0 with secure_aggregation = true and weighting = "lorar": a masked sum has '
            "one cap on weights for the whole plan; set max_weight to what the largest silo may weigh",
        ),
        ({"wire__update": "bfloat16"}, '[wire] update = "bfloat16" does not go with secure_aggregation'),
        (
            {"wire__update": "int8"},
            '[wire] update = "int8" does not go with secure_aggregation, under which updates travel as masked 32-bit '
            'integers: use "float32", or turn secure_aggregation off',
        ),
        (
            {"aggregation__min_survivors": 2},
            "aggregation.min_survivors = 2: input should be greater than or equal to 3",
        ),
        (
            {"aggregation__min_survivors": 5},
            "min_survivors = 5 does not hold with min_silos = 4 and colluders = 0: set it to at least 3",
        ),
        (
            {"aggregation__colluders": 2, "aggregation__threshold": 4},
            "min_survivors = 3 does not hold with min_silos = 4 and colluders = 2: set it to at least 4",
        ),
        ({"aggregation__threshold": 2}, "threshold = 2 does not hold with min_silos = 4: set 3 to 4, or 0"),
        ({"aggregation__threshold": 5}, "threshold = 5 does not hold with min_silos = 4: set 3 to 4, or 0"),
        ({"aggregation__threshold": -1}, "aggregation.threshold = -1"),
        ({"aggregation__colluders": -1}, "aggregation.colluders = -1"),
        (
            {"aggregation__delta_bound": 0.0},
            "aggregation.delta_bound = 0.0: input should be greater than or equal to 0.000000001",
        ),
        ({"aggregation__delta_bound": float("inf")}, "aggregation.delta_bound = inf"),
        ({"schedule__masking_deadline_s": 0.0}, "schedule.masking_deadline_s = 0.0: input should be greater than 0"),
    ],
)
def test_a_plan_whose_masks_could_not_hold_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_toml(toml_of(plan_value(**{**MASKS, **changes})).replace("Infinity", "inf"), "plan.toml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"training__weight_decay": 1e-9},
            "[training] weight_decay = 1e-09 does not go with secure_aggregation: it moves parameters that no "
            "example reaches by a public function of a silo's optimizer steps, and one sum tells the steps of all "
            "silos; set it to 0",
        ),
        ({"training__fedprox_mu": 10.1}, "fedprox_mu = 10.1 does not go with secure_aggregation"),
        ({"training__max_grad_norm": 9e-4}, "max_grad_norm = 0.0009 leaves next to nothing of a gradient"),
    ],
)
def test_attack_settings_by_which_a_masked_sum_tells_how_many_steps_silos_make(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_toml(toml_of(plan_value(**MASKS, **changes)), "plan.toml")
    assert says in str(caught.value)
    raw = canonical_json({**Plan.model_validate(plan_value(**MASKS)).model_dump(mode="json"), **sections_of(changes)})
    with pytest.raises(MalformedMessage, match=r"does not go with secure_aggregation"):
        Plan.from_json(raw)
    Plan.from_toml(toml_of(plan_value(**changes)), "plan.toml")  # a plain one


def adapted_value(**changes: Any) -> dict[str, Any]:
    """A masked plan that trains adapters."""
    files = {name: digest_of(content) for name, content in {**FILES, "base_layout.json": b"{}"}.items()}
    return plan_value(**MASKS, adapters__rank=2, model__base="ba" * 32, model__files=files, **changes)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({}, "[training] epochs = 1 with [adapters] rank = 2 does not go with secure_aggregation"),
        ({"epochs": 1, "batch_size": 1}, "set at least 2, or train to"),
        (
            {"epochs": 2, "overrides": {"silo-01": {"epochs": 1}}},
            "[training.overrides.silo-01] epochs = 1 with [adapters]",
        ),
        ({"epochs": 1, "overrides": {"silo-01": {"epochs": 4}}}, "[training] epochs = 1 with [adapters]"),
    ],
)
def test_attack_masked_adapters_of_silos_that_may_make_a_single_step(training: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Plan.model_validate(adapted_value(training=training))
    assert says in str(caught.value)
    Plan.model_validate(adapted_value(training={"epochs": 2, "overrides": {"silo-01": {"batch_size": 8}}}))
    Plan.model_validate(adapted_value(training=training) | {"aggregation": {}})


@pytest.mark.parametrize("adapters", [{"train": "b"}, {"train": "alternate"}])
def test_masked_adapters_of_which_one_half_is_trained_at_a_time_may_make_a_single_step(
    adapters: dict[str, str],
) -> None:
    """B has a gradient in the first step, and A once B is not zero."""
    fixed = {"model__fixed": "fa" * 32} if adapters["train"] == "b" else {}
    plan = Plan.model_validate(adapted_value(training={"epochs": 1}, adapters__train=adapters["train"], **fixed))
    assert (plan.adapters.train, plan.training.epochs) == (adapters["train"], 1)


def test_masked_adapters_with_privacy_of_records_make_the_steps_that_the_plan_says() -> None:
    Plan.model_validate(
        adapted_value(
            training={"dropout": 0.0},
            evaluation={"every": 0, "initial": False, "last": False},
            privacy={"level": "record", "noise_multiplier": 1.0},
        )
    )


def sections_of(changes: dict[str, Any]) -> dict[str, Any]:
    values = Plan.model_validate(plan_value(**changes)).model_dump(mode="json")
    return {path.partition("__")[0]: values[path.partition("__")[0]] for path in changes}


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training__fedprox_mu", 1e38),
        ("training__fedprox_mu", 1001.0),
        ("training__max_grad_norm", 1e30),
        ("training__dropout", 0.91),
        ("aggregation__max_weight", 1e300),
        ("aggregation__max_delta_norm", 1e300),
        ("privacy__max_noise_to_signal", 1e-300),
        ("privacy__max_noise_to_signal", 1e300),
        ("adapters__alpha", 5000),
    ],
)
def test_attack_numbers_by_which_some_silos_leave_float32s_range_and_others_do_not(
    masks: bool, path: str, value: float
) -> None:
    """1e38 x no way is 0 where a silo makes one step, and no number where it makes two."""
    key = path.replace("__", ".")
    changes = {**(MASKS if masks else {}), path: value}
    with pytest.raises(ConfigurationError, match=rf"{key} = .*: input should be"):
        Plan.from_toml(toml_of(plan_value(**changes)), "plan.toml")


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"length_grouping": 8}, r'length_grouping = 8 does not go with \[privacy\] level = "record".*: set it to 1'),
        (
            {"gradient_checkpointing": True},
            r'gradient_checkpointing = true does not go with \[privacy\] level = "record".*: set it to false',
        ),
    ],
)
def test_attack_what_makes_gradients_of_examples_depend_on_each_other_is_refused(
    training: dict[str, Any], says: str
) -> None:
    """Where the plan is made, and by the silo that reads it."""
    private = {"level": "record", "noise_multiplier": 1.0}
    off = {"every": 0, "initial": False, "last": False}
    value = plan_value(training={"dropout": 0.0, **training}, privacy=private, evaluation=off)
    with pytest.raises(ConfigurationError, match=says):
        Plan.from_toml(toml_of(value), "plan.toml")
    allowed = Plan.model_validate(plan_value(training=training))
    raw = json.loads(allowed.to_json())
    assert raw["training"].items() >= training.items()
    sections = {"privacy": PrivacySection.model_validate(private).model_dump(mode="json"), "evaluation": off}
    hostile = {key: {**raw.get(key, {}), **values} for key, values in sections.items()}
    hostile["training"] = {**raw["training"], "dropout": 0.0}
    with pytest.raises(MalformedMessage, match=says):
        Plan.from_json(canonical_json({**raw, **hostile}))


def test_int8_is_refused_beside_noise_and_bfloat16_is_not() -> None:
    private = {"level": "record", "noise_multiplier": 1.0}
    off = {"every": 0, "initial": False, "last": False}
    value = plan_value(training={"dropout": 0.0}, privacy=private, evaluation=off)
    says = (
        r'\[wire\] update = "int8" does not go with \[privacy\] level = "record".*: set it to "float32" or "bfloat16"'
    )
    with pytest.raises(ConfigurationError, match=says):
        Plan.from_toml(toml_of({**value, "wire": {"update": "int8"}}), "plan.toml")
    assert Plan.model_validate({**value, "wire": {"update": "bfloat16"}}).wire.update == "bfloat16"


def test_batches_of_one_length_do_not_go_with_losses_that_are_weights() -> None:
    value = plan_value(training={"length_grouping": 4, "loss_reduction": "logged"})
    weighing = {**value.get("aggregation", {}), "weighting": "loss_reduction"}
    with pytest.raises(ConfigurationError, match=r'length_grouping = 4 does not go with loss_reduction = "logged"'):
        Plan.from_toml(toml_of({**value, "aggregation": weighing}), "plan.toml")
    Plan.model_validate({**value, "aggregation": {"weighting": "equal"}})


def test_plans_of_before_there_were_settings_of_practice_keep_their_digests() -> None:
    training = json.loads(Plan.model_validate(plan_value()).to_json())["training"]
    assert not {"gradient_checkpointing", "length_grouping"} & training.keys()


@pytest.mark.parametrize("level", ["none", "silo"])
def test_attack_a_key_of_lines_that_nothing_is_grouped_by(level: str) -> None:
    """Silos whose lines lack it would decline by name, and no promise hangs on it."""
    private = {"level": level, "unit_field": "hiv_status", "noise_multiplier": 1.0}
    with pytest.raises(ConfigurationError, match=rf'unit_field = "hiv_status" does not go with level = "{level}"'):
        Plan.from_toml(toml_of(plan_value(privacy=private)), "plan.toml")
    PrivacySection.model_validate({**private, "level": "record"})


@pytest.mark.parametrize("colluders", range(5))
@pytest.mark.parametrize("threshold", [0, 3, 5, 8])
def test_what_a_plan_allows_holds_for_every_cohort_from_min_silos_on(colluders: int, threshold: int) -> None:
    survivors = least_survivors(colluders)
    ranges = Ranges.of(sizes=[1], largest_delta=[1.0], largest_weight=1.0)
    terms = Terms(
        model=bytes(32),
        link=ALONE,
        ranges=ranges,
        colluders=colluders,
        min_survivors=survivors,
        threshold=threshold or None,
    )

    def holds(cohort: int) -> bool:
        try:
            return bool(terms.parameters(silo_names(cohort)))
        except MalformedMessage:
            return False

    def is_allowed(silos: int) -> bool:
        changes = {
            "schedule__min_silos": silos,
            "aggregation__colluders": colluders,
            "aggregation__threshold": threshold,
            "aggregation__min_survivors": survivors,
        }
        try:
            return bool(Plan.model_validate(plan_value(**{**MASKS, **changes})))
        except ValueError:
            return False

    cohorts = range(3, 40)
    fails = [cohort for cohort in range(3, 120) if not holds(cohort)]
    assert [is_allowed(silos) for silos in cohorts] == [
        max(fails, default=0) < silos and not 0 < threshold < 3 for silos in cohorts
    ]


def test_keys_of_secure_aggregation_bind_nobody_without_it() -> None:
    plan = Plan.model_validate(plan_value(aggregation__threshold=9, aggregation__colluders=5))
    assert not plan.aggregation.secure_aggregation


@pytest.mark.parametrize(
    ("changes", "cap", "least"),
    [
        ({"max_weight": 20.0}, 20.0, 0.2),
        ({"max_weight": 20.0, "max_weight_ratio": 4.0}, 20.0, 5.0),
        ({"weighting": "equal"}, 1.0, 0.01),
        ({"weighting": "equal", "max_weight": 0.5}, 1.0, 0.01),
    ],
)
def test_weights_lie_within_the_ratio_below_the_cap(changes: dict[str, Any], cap: float, least: float) -> None:
    section = AggregationSection.model_validate(changes)
    assert (section.weight_cap, section.least_weight) == (cap, pytest.approx(least))


def texts_of(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Where each text of a plan stands, keys among them that a plan chooses itself."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_of(inner, *path, key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from texts_of(inner, *path, number)
    elif isinstance(value, str):
        yield path


@pytest.mark.parametrize(
    "spoils",
    [
        "\x1b[8m",
        "\nrefused: nothing",
        "\u2028",
        "\N{RIGHT-TO-LEFT OVERRIDE}",
        "\N{NO-BREAK SPACE}",
        "\N{HANGUL FILLER}",
        "  policy",
        " ",
    ],
    ids=ascii,
)
def test_attack_no_text_of_a_plan_can_look_like_a_line_of_somebody_elses(spoils: str) -> None:
    """In a report, in a terminal, wrapped or not: all that a plan says is shown to people who decide by it."""
    value = grouped_value("patient", model__revision="main", model__weights={"model.safetensors": "0" * 64})
    whole = Plan.model_validate(value).model_dump(mode="json")
    places = list(texts_of(whole))
    assert {("model", "source"), ("model", "revision"), ("privacy", "unit_field")} <= set(places)
    for *path, last in places:
        spoilt = json.loads(json.dumps(whole))
        within = spoilt
        for key in path:
            within = within[key]
        within[last] += spoils
        with pytest.raises(ValidationError):
            Plan.model_validate(spoilt)
    for section, key in (("model", "weights"), ("model", "files"), ("training", "overrides")):
        spoilt = json.loads(json.dumps(whole))
        spoilt[section][key][f"bank-a{spoils}"] = {} if key == "overrides" else "0" * 64
        with pytest.raises(ValidationError):
            Plan.model_validate(spoilt)


def test_free_text_of_a_plan_is_of_any_language() -> None:
    Plan.model_validate(grouped_value("患者", model__source="folder:T5 für Kliniken"))


def test_a_file_that_is_not_toml_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigurationError, match=r"plan.toml is not TOML: .*line 2"):
        Plan.from_toml("name = 'a'\n= 3", "plan.toml")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff"])
def test_plan_json_of_a_peer_that_does_not_parse_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Plan.from_json(raw)


def test_plan_json_in_another_spelling_is_refused() -> None:
    raw = Plan.model_validate(plan_value()).to_json()
    with pytest.raises(MalformedMessage, match="canonical"):
        Plan.from_json(json.dumps(json.loads(raw)).encode())


def test_overrides_of_one_silo() -> None:
    plan = Plan.model_validate(plan_value(training__overrides={"yelp": {"learning_rate": 0.5, "epochs": 9}}))
    assert plan.training.for_silo("yelp").learning_rate == 0.5
    assert plan.training.for_silo("yelp").epochs == 9
    assert plan.training.for_silo("yelp").batch_size == plan.training.batch_size
    assert plan.training.for_silo("atis").learning_rate == plan.training.learning_rate


def bundle(**changes: Any) -> PlanBundle:
    return PlanBundle(Plan.model_validate(plan_value(**changes)), FILES)


def test_bundle_round_trip() -> None:
    whole = bundle()
    again = PlanBundle.decode(whole.encode(), whole.plan.digest)
    assert again.plan == whole.plan
    assert dict(again.files) == FILES
    assert again.layout == LAYOUT


def wire(plan: bytes, files: list[tuple[str, bytes]]) -> bytes:
    message = federation_pb2.PlanBundle(plan_json=plan)
    for name, content in files:
        message.files.add(name=name, content=content)
    return message.SerializeToString()


def test_a_bundle_with_another_plan_than_asked_for_is_refused() -> None:
    with pytest.raises(IntegrityError, match="changed on the way"):
        PlanBundle.decode(bundle().encode(), bundle(seed=8).plan.digest)


def test_a_bundle_whose_file_was_swapped_is_refused() -> None:
    plan = bundle().plan
    raw = wire(plan.to_json(), [("config.json", b'{"model_type":"t5","d_ff":1}'), ("layout.json", LAYOUT.to_json())])
    with pytest.raises(IntegrityError, match=r"config.json does not have the digest"):
        PlanBundle.decode(raw, plan.digest)


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "modeling.py", "pytorch_model.bin", "config.json\0"])
def test_a_bundle_cannot_carry_code_pickle_or_paths(name: str) -> None:
    plan = bundle().plan
    files = [*FILES.items(), (name, b"x")]
    with pytest.raises(MalformedMessage):
        PlanBundle.decode(wire(plan.to_json(), list(files)), plan.digest)
    with pytest.raises(ValueError, match="may hold"):
        Plan.model_validate(plan_value(model__files={**plan_value()["model"]["files"], name: digest_of(b"x")}))


def test_a_bundle_that_names_a_file_twice_is_refused() -> None:
    plan = bundle().plan
    with pytest.raises(MalformedMessage, match="twice"):
        PlanBundle.decode(wire(plan.to_json(), [*FILES.items(), ("config.json", FILES["config.json"])]), plan.digest)


@pytest.mark.parametrize(
    "config", [{"auto_map": {"AutoModel": "evil.Model"}}, {"nested": [{"trust_remote_code": True}]}]
)
def test_a_bundle_whose_configuration_names_remote_code_is_refused(config: dict[str, Any]) -> None:
    content = canonical_json({"model_type": "t5", **config})
    files = {**FILES, "config.json": content}
    value = plan_value(model__files={name: digest_of(raw) for name, raw in files.items()})
    with pytest.raises(MalformedMessage, match="names code to run"):
        PlanBundle(Plan.model_validate(value), files)


def test_a_bundle_whose_layout_disagrees_with_the_plan_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="does not agree"):
        bundle(model__parameters=5)
