"""The rules that a silo had are not taken for none: a silo.toml that is gone, a link to nothing, a --config that was
forgotten."""

from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError
from lorica_security.identifiers import SiloName
from silo_agent.cli import main
from silo_agent.commands.command_line import Choice
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials, store_credentials
from silo_agent.edges.memory.masking_journal import masking_journal
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import TestNet, small_bundle

NET = TestNet.create()
RULES = "[policy]\nrequire_secure_aggregation = true\n"
MASKED = small_bundle(
    schedule={"rounds": 3, "min_silos": 3}, aggregation={"secure_aggregation": True, "max_weight": 100.0}
)


@pytest.fixture
def silo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiloFolder:
    monkeypatch.delenv("LORICA_SILO_DIR", raising=False)
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, NET.credentials("127.0.0.1:1", SiloName("hospital-a")))
    folder.make()
    return folder


def agent(folder: SiloFolder, *arguments: str | Path) -> Done:
    return run_command(main, *arguments, "--dir", folder.root)


def started(folder: SiloFolder, *arguments: str | Path) -> None:
    """As far as its data, of which there are none: by then it has read its rules, and recorded which."""
    agent(folder, "start", "--data", folder.root / "absent", *arguments).is_refusal(DataError, "train.jsonl")


def has_masked(folder: SiloFolder) -> None:
    masking_journal(folder, load_credentials(folder)).saw(MASKED, MASKED.plan.initial_model)


def every_command_refuses(folder: SiloFolder, *words: str) -> None:
    for arguments in (
        ["start"],
        ["plan", "show"],
        ["plan", "approve", MASKED.plan.digest],
        ["status"],
        ["groups", "show"],
    ):
        agent(folder, *arguments).is_refusal(ConfigurationError, *words)
    assert '"misconfiguration": "settings-wrong"' in agent(folder, "check", "--json").out


def test_attack_a_link_to_an_unmounted_volume_is_not_taken_for_no_rules(silo: SiloFolder, tmp_path: Path) -> None:
    """Not even where nothing tells that this silo had rules or has masked."""
    volume = tmp_path / "rules.toml"
    volume.write_text(RULES)
    silo.settings.symlink_to(volume)
    assert Choice().settings(silo).policy.require_secure_aggregation
    volume.unlink()
    every_command_refuses(silo, "is a link to", "which is not there")


def test_attack_a_silo_that_had_rules_does_not_go_on_without(silo: SiloFolder) -> None:
    silo.settings.write_text(RULES)
    started(silo)
    silo.settings.unlink()
    every_command_refuses(silo, f"the last start read {silo.settings}")
    silo.settings.write_text("")  # people who mean it
    started(silo)
    silo.settings.unlink()
    every_command_refuses(silo, f"the last start read {silo.settings}")


def test_attack_a_silo_that_has_masked_does_not_go_on_without_rules(silo: SiloFolder) -> None:
    """Also where its journal, which knows of the last start, is gone too."""
    has_masked(silo)
    every_command_refuses(silo, "this silo has masked", "require_secure_aggregation = true")
    silo.settings.write_text(RULES)
    started(silo)


def test_a_new_silo_needs_no_rules(silo: SiloFolder) -> None:
    started(silo)
    started(silo)


def test_attack_a_start_that_forgets_the_config_of_the_last_one(silo: SiloFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "strict.toml"
    elsewhere.write_text(RULES)
    started(silo, "--config", elsewhere)
    silo.settings.write_text("")
    agent(silo, "start").is_refusal(ConfigurationError, f"the last start had --config {elsewhere}", "give it again")
    started(silo, "--config", elsewhere)
    started(silo, "--config", silo.settings)
    elsewhere.unlink()
    started(silo, "--config", silo.settings)
    agent(silo, "start", "--config", elsewhere).is_refusal(ConfigurationError, f"{elsewhere} is missing")
