"""silo.toml and the policy in it: every refusal names the key, the value and the remedy."""

from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, PolicyRefusal
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.settings import Settings
from silo_wire.manifest import manifest_of
from tests.support.federation_peer import SILO, small_bundle, vector_of

BUNDLE = small_bundle()


def written(folder: Path, text: str) -> Path:
    path = folder / "silo.toml"
    path.write_text(text)
    return path


def test_everything_is_optional(tmp_path: Path) -> None:
    assert Settings.read(written(tmp_path, "")) == Settings()


def test_relative_paths_are_those_of_the_file(tmp_path: Path) -> None:
    settings = Settings.read(written(tmp_path, '[data]\nfolder = "data"\n[database]\nurl = "sqlite:///own.db"\n'))
    assert settings.data.folder == str(tmp_path / "data")
    assert settings.database.url == f"sqlite:///{tmp_path}/own.db"


@pytest.mark.parametrize("url", ["sqlite:////absolute.db", "postgresql://u:p@h/d"])
def test_absolute_databases_stay(tmp_path: Path, url: str) -> None:
    assert Settings.read(written(tmp_path, f'[database]\nurl = "{url}"\n')).database.url == url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nfoldr = 'x'", r"silo\.toml: unknown key data\.foldr: remove it or correct its spelling"),
        ("[polcy]", r"unknown key polcy"),
        ("[data]\nmax_bad_lines_share = 1.5", r"data\.max_bad_lines_share = 1\.5: input should be less than 1"),
        ("[training]\ndevice = 'tpu'", r"training\.device = 'tpu'"),
        ("[training]\nthreads = '2'", r"training\.threads = '2': input should be a valid integer"),
        ("[sql]\nseconds = 0", r"sql\.seconds = 0"),
        ("[storage]\nmodels_kept = 0", r"storage\.models_kept = 0"),
        ("[policy]\napproved_plans = ['abc']", r"policy\.approved_plans.*'abc'"),
        ("[policy]\nmax_epochs = 0", r"policy\.max_epochs = 0"),
        ("[data", r"silo\.toml is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Settings.read(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"silo\.toml is missing: correct --config"):
        Settings.read(tmp_path / "silo.toml")


def policy(**rules: object) -> SiloPolicy:
    return SiloPolicy(rules=PolicyRules.model_validate(rules), silo=SILO)


def test_the_defaults_allow_an_ordinary_plan() -> None:
    policy().check_plan(BUNDLE)


def test_a_plan_that_is_approved_by_digest_is_allowed() -> None:
    policy(approved_plans=[BUNDLE.plan.digest]).check_plan(BUNDLE)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"approved_plans": ["00" * 32]}, f"digest {BUNDLE.plan.digest} is not approved"),
        ({"max_parameters": 999}, "asks for 1000 parameters of the model, .* allows 999"),
        ({"max_upload_bytes": 3999}, "asks for 4000 bytes of an update, .* allows 3999"),
        ({"max_rounds": 2}, "asks for 3 rounds, .* allows 2"),
    ],
)
def test_a_plan_beyond_a_rule_is_refused_by_its_name(rules: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyRefusal, match=message) as refusal:
        policy(**rules).check_plan(BUNDLE)
    assert [refusal.value.rule] == list(rules)


def test_epochs_are_those_of_this_silo() -> None:
    bundle = small_bundle(training={"epochs": 2, "overrides": {SILO: {"epochs": 50}}})
    with pytest.raises(PolicyRefusal, match="asks for 50 epochs"):
        policy(max_epochs=10).check_plan(bundle)
    policy(max_epochs=50).check_plan(bundle)


def test_an_update_is_measured_again_before_it_leaves() -> None:
    manifest = manifest_of(BUNDLE.layout, [vector_of(BUNDLE.layout, 1)])
    policy(max_upload_bytes=4000).check_upload(manifest)
    with pytest.raises(PolicyRefusal, match="allows 3999"):
        policy(max_upload_bytes=3999).check_upload(manifest)


def test_the_registry_of_shared_records_is_a_folder_none_or_unset(tmp_path: Path) -> None:
    for given, read in (("registry", f"{tmp_path}/registry"), ("/srv/registry", "/srv/registry"), ("none", "none")):
        settings = Settings.read(written(tmp_path, f'[policy]\nshared_budget = "{given}"\n'))
        assert settings.policy.shared_budget == read
    unset = Settings.read(written(tmp_path, "[policy]\nmax_rounds = 3\n")).policy
    assert (unset.shared_budget, unset.model_fields_set) == ("", {"max_rounds"})


def test_queries_on_the_database_can_be_forbidden() -> None:
    policy().check_execution()
    with pytest.raises(PolicyRefusal, match="allow_execution = true"):
        policy(allow_execution=False).check_execution()
