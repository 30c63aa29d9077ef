"""`silo-agent trust` and `silo-agent plan` as people type them, rightly and wrongly."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_security.audit.entry import Event
from lorica_security.console.preflight import Check, Outcome
from lorica_security.errors import (
    EXIT_CODES,
    ConfigurationError,
    Conflict,
    DataError,
    IntegrityError,
    LoricaError,
    StateError,
)
from lorica_security.host.files import write_private
from lorica_security.host.key_file import write_key
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key
from lorica_security.identity.key_text import key_text
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.identity.succession import succession_statement
from lorica_security.on_disk.reading import read_log
from lorica_security.secure_aggregation.groups.release_groups import Partition, SignedLink, first_link
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from silo_agent.cli import main
from silo_agent.edges.accounts.audit_log import audited
from silo_agent.edges.check.preflight import Ground, preflight
from silo_agent.edges.disk.plan_approvals import PlanApprovals
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.private_record import AS_HELD
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_credentials
from silo_agent.edges.memory.identity_succession import seal_anew
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import silo_identity, trust_store
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.settings import Settings
from silo_wire.codecs.groups_codec import GroupsOffer
from silo_wire.plans.plan import PlanBundle
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import FEDERATION, TestNet, small_bundle
from tests.support.secagg_federation import attempt
from tests.support.tiny_t5 import bundle_of, random_model, save_copy, sized_bundle

NET = TestNet.create()
HOSPITAL, BANK, CLINIC = SiloName("hospital-a"), SiloName("bank-b"), SiloName("clinic-c")
PLAN = small_bundle()
DIGEST = PLAN.plan.digest
MASKED = small_bundle(
    schedule={"rounds": 3, "min_silos": 4},
    aggregation={"secure_aggregation": True, "max_weight": 100.0, "min_survivors": 4},
)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command finds this machine's own silo."""
    monkeypatch.delenv("LORICA_SILO_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


UNCOMPARED = "--without-comparing-the-model"
ALTHOUGH = "--although-a-delta-may-be-in-two-sums"


def enrolled(root: Path, name: SiloName) -> tuple[SiloFolder, SiloCredentials]:
    folder, credentials = SiloFolder(root / name), NET.credentials("127.0.0.1:1", name)
    store_credentials(folder, credentials)
    folder.make()
    return folder, credentials


@pytest.fixture
def silo(tmp_path: Path) -> SiloFolder:
    return enrolled(tmp_path, HOSPITAL)[0]


def agent(folder: SiloFolder, *arguments: str | Path) -> Done:
    return run_command(main, *arguments, "--dir", folder.root)


def said(folder: SiloFolder, *arguments: str | Path) -> str:
    done = agent(folder, *arguments)
    assert (done.code, done.err) == (0, "")
    return done.out


def contents(folder: SiloFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.root.rglob("*.json"))}


def text_of(key: Any, name: SiloName = BANK) -> str:
    return key_text(silo_identity(FEDERATION, name), key.public_key())


# --- trust
# -------------------------------------------------------------------------------------------------------------


def test_two_silos_pin_each_other_with_what_each_prints(tmp_path: Path) -> None:
    (hospital, hospital_keys), (bank, bank_keys) = (enrolled(tmp_path, name) for name in (HOSPITAL, BANK))
    assert said(hospital, "trust", "add", *said(bank, "trust", "own").split()) == "silo bank-b is pinned\n"
    assert said(bank, "trust", "add", *said(hospital, "trust", "own").split()) == "silo hospital-a is pinned\n"
    assert trust_store(hospital, hospital_keys).identities() == {BANK: bank_keys.identity_key.public_key()}
    assert trust_store(bank, bank_keys).identities() == {HOSPITAL: hospital_keys.identity_key.public_key()}

    (line,) = said(hospital, "trust", "list").splitlines()
    assert line.startswith(f"{said(bank, 'trust', 'own').strip()} added by people, ")
    own = json.loads(said(bank, "trust", "own", "--json"))
    listed = json.loads(said(hospital, "trust", "list", "--json"))
    assert own == {"federation": FEDERATION, "silo": BANK, "identity_key": text_of(bank_keys.identity_key)}
    assert listed["removed"] == []
    assert [(pin["silo"], pin["identity_key"], pin["how"]) for pin in listed["pinned"]] == [
        (BANK, own["identity_key"], "added")
    ]

    assert "no longer pinned" in said(hospital, "trust", "remove", BANK)
    assert json.loads(said(hospital, "trust", "list", "--json")) == {"pinned": [], "removed": [BANK]}
    assert "not taken on first use: bank-b" in said(hospital, "trust", "list")


def test_a_list_without_pins_says_what_to_do(silo: SiloFolder) -> None:
    assert "silo-agent trust add NAME KEY" in said(silo, "trust", "list")


def test_the_same_key_again_and_a_key_of_first_use_are_told_apart(tmp_path: Path) -> None:
    silo, credentials = enrolled(tmp_path, HOSPITAL)
    key = new_identity_key()
    trust_store(silo, credentials, first_use=True).trusted_on_first_use(BANK, key.public_key())
    assert "taken on first use" in said(silo, "trust", "list")
    assert "is confirmed now" in said(silo, "trust", "add", BANK, text_of(key))
    assert "added by people" in said(silo, "trust", "list")
    assert "was pinned with this key already" in said(silo, "trust", "add", BANK, text_of(key))


def test_attack_another_key_for_a_pinned_silo_is_refused_and_both_pins_are_shown(silo: SiloFolder) -> None:
    pinned, other = new_identity_key(), new_identity_key()
    said(silo, "trust", "add", BANK, text_of(pinned))
    before = contents(silo)
    agent(silo, "trust", "add", BANK, text_of(other)).is_refusal(
        Conflict, text_of(pinned), text_of(other), "succession statement", "trust remove bank-b"
    )
    assert contents(silo) == before


def test_a_successor_is_taken_with_its_predecessors_word_alone(silo: SiloFolder) -> None:
    pinned, new, thief = new_identity_key(), new_identity_key(), new_identity_key()
    said(silo, "trust", "add", BANK, text_of(pinned))
    identity = silo_identity(FEDERATION, BANK)
    forged = succession_statement(thief, identity=identity, new_key=thief.public_key()).hex()
    agent(silo, "trust", "add", BANK, text_of(thief), "--succession", forged).is_refusal(
        IntegrityError, "not signed by the pinned key", text_of(pinned), text_of(thief)
    )
    signed = succession_statement(pinned, identity=identity, new_key=new.public_key()).hex()
    done = said(silo, "trust", "add", BANK, text_of(new), "--succession", signed)
    assert "new key, which the key before signed" in done
    (pin,) = json.loads(said(silo, "trust", "list", "--json"))["pinned"]
    assert (pin["identity_key"], pin["predecessor"]) == (text_of(new), text_of(pinned))
    assert "succeeded the key before" in said(silo, "trust", "list")


KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWN_LIKE = text_of(KEY)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["add", "Bank_B", OWN_LIKE], ConfigurationError, ["silo name 'Bank_B'", "a-z"]),
        (["add", "../bank-b", OWN_LIKE], ConfigurationError, ["silo name '../bank-b'"]),
        (["add", BANK, "hello"], ConfigurationError, ["'hello'", "17 groups of 4", "trust own"]),
        (["add", BANK, ""], ConfigurationError, ["17 groups of 4"]),
        (["add", BANK, OWN_LIKE[:-1]], ConfigurationError, ["17 groups of 4"]),
        (["add", BANK, text_of(KEY, CLINIC)], ConfigurationError, ["silo bank-b", "mistyped, or another silo's"]),
        (["add", CLINIC, OWN_LIKE], ConfigurationError, ["silo clinic-c", "mistyped, or another silo's"]),
        (["add", HOSPITAL, text_of(KEY, HOSPITAL)], ConfigurationError, ["hospital-a is this silo itself"]),
        (["add", BANK, OWN_LIKE, "--succession", "00"], ConfigurationError, ["succession statement", "128 digits"]),
        (["add", BANK, OWN_LIKE, "--succession", "g" * 128], ConfigurationError, ["succession statement"]),
        (["add", BANK, OWN_LIKE, "--succession", "00" * 64], StateError, ["no key is pinned for silo bank-b"]),
        (["remove", BANK], StateError, ["no key is pinned for silo bank-b", "trust list"]),
        (["remove", "Bank B"], ConfigurationError, ["silo name 'Bank B'"]),
    ],
    ids=lambda value: "-".join(value)[:40].replace("/", "") if isinstance(value, list) else None,
)
def test_what_is_mistyped_is_one_line_and_changes_nothing(
    silo: SiloFolder, arguments: list[str], kind: type[LoricaError], words: list[str]
) -> None:
    before = contents(silo)
    agent(silo, "trust", *arguments).is_refusal(kind, *words)
    assert contents(silo) == before


@pytest.mark.parametrize("arguments", [["trust", "ad"], ["trust", "add", BANK], ["plan", "aprove"], ["trust", "add"]])
def test_a_mistyped_command_line_is_2(silo: SiloFolder, arguments: list[str]) -> None:
    done = agent(silo, *arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [["list"], ["add", BANK, OWN_LIKE], ["remove", BANK]])
@pytest.mark.parametrize("damage", ["garbage", "mode"])
def test_damaged_pins_are_named_and_left_as_they_are(silo: SiloFolder, arguments: list[str], damage: str) -> None:
    said(silo, "trust", "add", CLINIC, text_of(KEY, CLINIC))
    if damage == "garbage":
        silo.peers.write_text("{")
    else:
        silo.peers.chmod(0o664)
    before = contents(silo)
    agent(silo, "trust", *arguments).is_refusal(ConfigurationError, str(silo.peers))
    assert contents(silo) == before


@pytest.mark.parametrize(
    "arguments",
    [
        *(["trust", "own"], ["trust", "list"], ["trust", "add", BANK, OWN_LIKE], ["trust", "remove", BANK]),
        *(["plan", "show"], ["plan", "approve", DIGEST]),
    ],
    ids=" ".join,
)
def test_before_enrolment_every_command_says_so_and_leaves_nothing(tmp_path: Path, arguments: list[str]) -> None:
    empty = SiloFolder(tmp_path / "empty")
    agent(empty, *arguments).is_refusal(ConfigurationError, str(empty.root), "silo-agent enroll")
    assert not empty.root.exists()


# --- plan
# --------------------------------------------------------------------------------------------------------------


def rules(silo: SiloFolder, *lines: str) -> None:
    silo.settings.write_text("\n".join(["[policy]", *lines]))


def offered(silo: SiloFolder, bundle: PlanBundle = PLAN) -> None:
    """What an agent leaves whose policy refused the plan."""
    PlanStore(silo.plans).keep_refused(bundle)


def shown(silo: SiloFolder, *arguments: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(said(silo, "plan", "show", "--json", *arguments))
    return read


def test_a_plan_is_shown_before_it_is_approved_and_approved_by_its_digest(silo: SiloFolder) -> None:
    rules(silo, 'approved_plans = "ask"')
    offered(silo)
    text = said(silo, "plan", "show")
    for part in ("plan small", DIGEST, "1,000 parameters", "4,000 bytes", "lorar", "no: the coordinator sees"):
        assert part in text
    assert "refused by approved_plans" in text
    (facts,) = shown(silo)
    assert [refusal["rule"] for refusal in facts["refused_by"]] == ["approved_plans"]
    assert facts["tensors"] == {"w": 1000}

    assert f"\nto allow it          silo-agent plan approve {DIGEST}\n" in f"{text}\n"

    assert said(silo, "plan", "approve", DIGEST) == f"plan small {DIGEST} is approved; no agent is running\n"
    assert shown(silo)[0]["refused_by"] == []
    text = said(silo, "plan", "show", DIGEST)
    assert "policy               allowed" in text
    assert "to allow it" not in text


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"training": {"epochs": 3}}, "3 epochs in a round"),
        ({"training": {"steps": 40}}, "40 optimizer steps in a round"),
        (
            {
                "privacy": {"level": "record", "noise_multiplier": 3.0, "steps": 5},
                "training": {"dropout": 0.0},
                "evaluation": {"every": 0, "initial": False, "last": False},
            },
            "5 optimizer steps in a round",
        ),
    ],
)
def test_how_long_a_round_trains_here_is_shown(silo: SiloFolder, sections: dict[str, Any], told: str) -> None:
    offered(silo, small_bundle(**sections))
    assert f"training here        {told}" in said(silo, "plan", "show")


def test_attack_a_plan_that_was_offered_after_the_one_that_people_looked_at_is_not_approved(silo: SiloFolder) -> None:
    """Whatever waits by then: the command takes the digest of what was shown, all of it, and nothing else."""
    rules(silo, 'approved_plans = "ask"')
    offered(silo)
    assert DIGEST in said(silo, "plan", "show")
    other = small_bundle(training={"learning_rate": 10.0, "epochs": 1000})
    offered(silo, other)
    before = contents(silo)
    assert agent(silo, "plan", "approve").code == 2
    assert contents(silo) == before
    agent(silo, "plan", "approve", DIGEST).is_refusal(StateError, f"plan {DIGEST} is not here, and")
    assert contents(silo) == before


def test_parameters_of_secure_aggregation_are_shown_and_what_the_policy_says_to_them(silo: SiloFolder) -> None:
    rules(silo, "require_secure_aggregation = true", "min_survivors = 5", "colluders = 1")
    offered(silo, MASKED)
    (facts,) = shown(silo)
    assert facts["secure_aggregation"] == {"min_cohort": 4, "threshold": 0, "colluders": 0, "min_survivors": 4}
    assert facts["update_bytes"] == 4028
    assert [refusal["rule"] for refusal in facts["refused_by"]] == ["min_survivors", "colluders", "approved_plans"]
    text = said(silo, "plan", "show")
    assert "yes: cohorts of at least 4 silos, threshold more than two thirds, 0 colluders, sums of at least 4" in text
    assert "refused by min_survivors: " in text


def test_every_setting_of_a_plan_is_shown_before_people_approve_it(silo: SiloFolder) -> None:
    """What a key that is new is about has to be shown as well, and so has each file of the plan by its digest."""
    bundle = small_bundle(
        training={"overrides": {BANK: {"epochs": 1}}, "dropout": 0.0},
        privacy={"level": "silo", "nominal_silos": 3, "target_epsilon": 8.0, "noise_multiplier": 1.0},
        evaluation={"every": 0, "initial": False, "last": False},
        aggregation={"weighting": "equal"},
    )
    offered(silo, bundle)
    (facts,) = shown(silo)
    text = said(silo, "plan", "show")
    assert "no scores: the plan has none" in text
    for section, values in bundle.plan.model_dump(mode="json").items():
        if section in ("model", "adapters", "semi_supervised", "version", "federation"):
            continue
        for key in values if isinstance(values, dict) else [section]:
            where = {"seed": "schedule"}.get(section, section)
            if key in (
                "secure_aggregation",
                "threshold",
                "colluders",
                "min_survivors",
            ):  # of masks, which it has none of
                continue
            assert key == "name" or key == "overrides" or key in facts[where]
            assert key == "name" or f"{'override' if key == 'overrides' else key} " in text
    assert "adapters             rank = 0" in text
    assert "semi_supervised      unlabelled = []" in text
    for name, digest in bundle.plan.model.files.items():
        assert f"{digest}\n" in text[text.index(f"digest of {name}") :]


@pytest.mark.parametrize(
    ("masked", "tells", "says"),
    [
        (True, "true", "scores masked as the update is: the coordinator sees their sum over the cohort"),
        (True, "false", "no scores, by [policy] tell_scores: zeros stand for them in the sum"),
        (False, "true", "scores of this silo alone, which the coordinator sees"),
        (False, "false", "no scores, by [policy] tell_scores\n"),
    ],
)
def test_how_scores_leave_is_shown(silo: SiloFolder, masked: bool, tells: str, says: str) -> None:
    rules(silo, f"tell_scores = {tells}")
    offered(silo, MASKED if masked else PLAN)
    text = said(silo, "plan", "show")
    assert f"bytes of an update in a round; {says}" in text
    assert "unusual" not in text


def test_attack_changed_plan_waits_for_an_approval_of_its_own(silo: SiloFolder) -> None:
    rules(silo, 'approved_plans = "ask"')
    offered(silo)
    said(silo, "plan", "approve", DIGEST)
    changed = small_bundle(training={"epochs": 2})
    offered(silo, changed)
    assert [refusal["rule"] for refusal in shown(silo, changed.plan.digest)[0]["refused_by"]] == ["approved_plans"]
    assert changed.plan.digest in said(silo, "plan", "approve", changed.plan.digest)
    assert set(PlanApprovals(silo.approvals, Seal(load_credentials(silo).identity_key)).record().approved) == {
        DIGEST,
        changed.plan.digest,
    }


def test_a_digest_that_was_agreed_on_can_be_approved_before_the_plan_is_offered(silo: SiloFolder) -> None:
    rules(silo, 'approved_plans = "ask"')
    agent(silo, "plan", "approve", DIGEST).is_refusal(StateError, "cannot be compared", UNCOMPARED)
    assert "not offered here yet" in said(silo, "plan", "approve", DIGEST, UNCOMPARED)
    offered(silo)
    assert shown(silo)[0]["refused_by"] == []


def test_approval_does_not_lift_another_rule_and_says_so(silo: SiloFolder) -> None:
    rules(silo, 'approved_plans = "ask"', "max_rounds = 2")
    offered(silo)
    assert "it is still refused by max_rounds: " in said(silo, "plan", "approve", DIGEST)


def test_where_any_plan_may_run_an_approval_says_that_it_was_not_needed(silo: SiloFolder) -> None:
    assert 'approved_plans is "any"' in said(silo, "plan", "approve", DIGEST, UNCOMPARED)


def test_where_silo_toml_lists_the_plans_the_command_cannot_add_one(silo: SiloFolder) -> None:
    rules(silo, f'approved_plans = ["{"00" * 32}"]')
    offered(silo)
    before = contents(silo)
    agent(silo, "plan", "approve", DIGEST).is_refusal(ConfigurationError, "approved_plans", DIGEST, "restart the agent")
    assert contents(silo) == before


def test_the_policy_is_that_of_the_settings_that_are_named(silo: SiloFolder, tmp_path: Path) -> None:
    offered(silo)
    strict = tmp_path / "strict.toml"
    strict.write_text("[policy]\nmax_parameters = 1")
    assert shown(silo)[0]["refused_by"] == []
    refusals = shown(silo, "--config", str(strict))[0]["refused_by"]
    assert [refusal["rule"] for refusal in refusals] == ["max_parameters"]


def test_a_plan_with_masks_is_approved_with_a_copy_of_its_model_or_by_a_named_flag(
    silo: SiloFolder, tmp_path: Path
) -> None:
    model = random_model()
    bundle = bundle_of(
        model,
        source="hub:somebody/model",
        aggregation={"secure_aggregation": True, "max_weight": 100.0},
        schedule={"rounds": 3, "min_silos": 3},
    )
    digest = bundle.plan.digest
    rules(silo, "require_secure_aggregation = true")
    offered(silo, bundle)
    before = contents(silo)
    agent(silo, "plan", "approve", digest).is_refusal(ConfigurationError, "was not compared", "--model DIR", UNCOMPARED)
    save_copy(random_model(1), tmp_path / "other")
    done = agent(silo, "plan", "approve", digest, "--model", tmp_path / "other")
    done.is_refusal(IntegrityError, "Nothing was approved")
    assert contents(silo) == before
    assert f"to allow it          silo-agent plan approve {digest} --model DIR" in said(silo, "plan", "show")
    save_copy(model, tmp_path / "copy")
    text = said(silo, "plan", "approve", digest, "--model", tmp_path / "copy")
    assert "its initial model was compared with a copy, and so were its configuration and its tokenizer" in text
    (facts,) = shown(silo)
    assert (facts["compared"], facts["refused_by"]) == (True, [])
    silo.approvals.unlink()
    assert "was not compared" in said(silo, "plan", "approve", digest, UNCOMPARED)
    (facts,) = shown(silo)
    assert (facts["compared"], facts["refused_by"]) == (False, [])
    log = read_log(silo.audit, keys=[load_credentials(silo).identity_key.public_key()])
    approvals = [entry.text("model") for entry in log.of(Event.PLAN_APPROVED)]
    assert approvals == ["compared with a copy", "not compared"]


def test_a_plan_of_a_size_is_approved_by_making_all_of_it_again(silo: SiloFolder) -> None:
    masks: dict[str, Any] = {"secure_aggregation": True, "max_weight": 100.0}
    bundle = sized_bundle(7, schedule={"rounds": 3, "min_silos": 3}, aggregation=masks)
    rules(silo, "require_secure_aggregation = true")
    offered(silo, bundle)
    assert f"to allow it          silo-agent plan approve {bundle.plan.digest}\n" in said(silo, "plan", "show")
    text = said(silo, "plan", "approve", bundle.plan.digest)
    assert "its initial model was made again from its seed, and so were its configuration and its tokenizer" in text
    assert shown(silo)[0]["refused_by"] == []


def test_the_command_that_is_printed_for_a_plan_allows_it_wherever_it_is_printed(
    silo: SiloFolder, tmp_path: Path
) -> None:
    """Of a model that people fetch, beside a plan that this silo masked under: `--model` and `--although` are both in
    it."""
    model = random_model()
    bundle = bundle_of(
        model,
        source="folder:export",
        aggregation={"secure_aggregation": True, "max_weight": 100.0},
        schedule={"rounds": 3, "min_silos": 3},
    )
    rules(silo, "require_secure_aggregation = true")
    masking_journal(silo, load_credentials(silo)).remember(SiloMemory().joined(attempt(plan=bytes.fromhex(DIGEST))))
    (silo.masking / "memory").unlink()
    said(silo, "trust", "reset-memory", ALTHOUGH)  # what is left of that plan is that it was masked under
    offered(silo, bundle)
    command = f"silo-agent plan approve {bundle.plan.digest} --model DIR --although {DIGEST}"
    (facts,) = shown(silo)
    assert facts["to_allow"] == command
    assert f"\nto allow it          {command}\n" in f"{said(silo, 'plan', 'show')}\n"
    assert {it["rule"]: f"`{command}`" in it["detail"] for it in facts["refused_by"]} == {
        "approved_plans": True,
        "one_lineage": True,
    }
    agent(silo, "plan", "approve", bundle.plan.digest).is_refusal(ConfigurationError, f"`{command}`")
    save_copy(model, tmp_path / "copy")
    _, *arguments = command.replace("DIR", str(tmp_path / "copy")).split()
    said(silo, *arguments)
    (facts,) = shown(silo)
    assert (facts["to_allow"], facts["refused_by"]) == (None, [])
    assert "to allow it" not in said(silo, "plan", "show")


def test_no_command_is_printed_for_a_plan_that_silo_toml_is_to_list(silo: SiloFolder) -> None:
    rules(silo, f'approved_plans = ["{"0" * 64}"]')
    offered(silo)
    (facts,) = shown(silo)
    assert [refusal["rule"] for refusal in facts["refused_by"]] == ["approved_plans"]
    assert facts["to_allow"] is None
    assert "to allow it" not in said(silo, "plan", "show")


def test_memory_that_was_lost_is_let_go_by_people_alone_and_stands_in_the_audit_log(silo: SiloFolder) -> None:
    agent(silo, "trust", "reset-memory").is_refusal(StateError, "is whole: nothing was changed")
    plan = bytes.fromhex(MASKED.plan.digest)
    journal = masking_journal(silo, load_credentials(silo))
    memory = SiloMemory().joined(attempt(plan=plan))
    journal.remember(memory)
    journal.remember(memory.answered(attempt(plan=plan)))
    (silo.masking / "memory").unlink()
    agent(silo, "trust", "reset-memory").is_refusal(ConfigurationError, "memory is missing", ALTHOUGH)
    assert journal.problem() is not None
    before = contents(silo)
    with ProcessLock(silo.lock, "silo agent"):
        agent(silo, "trust", "reset-memory", ALTHOUGH).is_refusal(Conflict, "another silo agent", "stop it first")
    assert contents(silo) == before
    assert "masks again" in said(silo, "trust", "reset-memory", ALTHOUGH)
    known = journal.memory().of(plan)
    assert known is not None
    assert (known.round, known.answered) == (1, True)
    log = read_log(silo.audit, keys=[load_credentials(silo).identity_key.public_key()])
    (entry,) = log.of(Event.MEMORY_RESET)
    assert "memory is missing" in entry.text("detail")


def test_people_are_told_before_and_after_a_reset_what_nothing_proves(silo: SiloFolder) -> None:
    said(silo, "trust", "add", BANK, text_of(KEY))
    content = json.loads(unsealed(silo.lineages.read_bytes()))
    content["groups"]["number"] = 9
    silo.lineages.write_text(json.dumps(content))
    doubts = [
        "nothing proves what lineages.json says",
        "number 9 is noted",
        AS_HELD,
        "nothing proves what peers.json says",
    ]
    before = contents(silo)
    agent(silo, "trust", "reset-memory").is_refusal(ConfigurationError, *doubts, ALTHOUGH)
    assert contents(silo) == before
    text = said(silo, "trust", "reset-memory", ALTHOUGH)
    for doubt in (*doubts, f"{BANK} {text_of(KEY)} added by people"):
        assert doubt in text
    agent(silo, "trust", "reset-memory", ALTHOUGH).is_refusal(StateError, "is whole: nothing was changed")
    agent(silo, "trust", "reset-memory", AS_HELD).is_refusal(ConfigurationError, "number 9 is noted", ALTHOUGH)
    assert "masks again" in said(silo, "trust", "reset-memory", ALTHOUGH, AS_HELD)
    agent(silo, "trust", "reset-memory", ALTHOUGH, AS_HELD).is_refusal(StateError, "is whole: nothing was changed")
    log = read_log(silo.audit, keys=[load_credentials(silo).identity_key.public_key()])
    assert all("number 9 is noted" in entry.text("detail") for entry in log.of(Event.MEMORY_RESET))


@pytest.mark.parametrize(
    "arguments",
    [
        *(["trust", "list"], ["trust", "add", BANK, OWN_LIKE], ["trust", "remove", CLINIC]),
        *(["trust", "reset-memory", ALTHOUGH], ["groups", "show"], ["groups", "approve", "00" * 32]),
        *(["plan", "show"], ["plan", "approve", DIGEST], ["identity", "show"]),
    ],
    ids=" ".join,
)
def test_in_the_midst_of_a_rotation_no_command_says_that_files_were_edited(
    silo: SiloFolder, arguments: list[str]
) -> None:
    said(silo, "trust", "add", CLINIC, text_of(KEY, CLINIC))
    offered(silo)
    said(silo, "plan", "approve", DIGEST)
    write_private(silo.predecessors, Seal(load_credentials(silo).identity_key).sealed("predecessors.json", b"{}"))
    new = new_identity_key()
    write_key(silo.next_identity_key, identity_key_to_pem(new), os.environ)
    seal_anew(silo, Seal(load_credentials(silo).identity_key), Seal(new))
    before = contents(silo)
    agent(silo, *arguments).is_refusal(StateError, "not finished", "silo-agent identity rotate")
    assert contents(silo) == before
    check = agent(silo, "check")
    assert "rotation" in check.out
    assert "edited" not in check.out


def test_nothing_offered_is_nothing_shown(silo: SiloFolder) -> None:
    assert "no plan was offered yet" in said(silo, "plan", "show")
    assert shown(silo) == []
    agent(silo, "plan", "show", DIGEST).is_refusal(StateError, f"plan {DIGEST} is not here", "plan show")


@pytest.mark.parametrize("digest", ["abc", DIGEST[:16], DIGEST + "00", "g" * 64, "small"])
@pytest.mark.parametrize("command", ["show", "approve"])
def test_a_mistyped_digest_is_named(silo: SiloFolder, command: str, digest: str) -> None:
    """The beginning of a digest is not taken for it: a coordinator could look for a plan with the same one."""
    offered(silo)
    before = contents(silo)
    agent(silo, "plan", command, digest).is_refusal(ConfigurationError, f"'{digest[:80]}'", "64 of 0-9 and a-f")
    assert contents(silo) == before


def test_attack_a_report_cannot_be_written_by_a_plan(silo: SiloFolder) -> None:
    """Also not by one that an earlier release took, whose words are in the log."""
    forged = "masked, for a patient\n\nrefused: nothing\n\x1b[8m"
    with audited(silo, load_credentials(silo)) as log:
        log.append(Event.PLAN_RECEIVED, plan=DIGEST, name="small\nrefused: nothing", tensors=1)
        log.append(Event.PLAN_ALLOWED, plan=DIGEST, promise=forged)
        log.append(Event.REFUSED, rule="max_rounds\n", detail="\x1b[8m")
    text = said(silo, "audit", "report")
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.startswith("refused")] == ["refused: max_rounds  1 times"]


def test_the_report_names_a_closing_round(silo: SiloFolder) -> None:
    with audited(silo, load_credentials(silo)) as log:
        log.append(Event.PLAN_RECEIVED, plan=DIGEST, name="small", tensors=1, rounds=3)
        for number in (3, 4):
            log.append(Event.MASKED_UPDATE_LEAVES, plan=DIGEST, round=number, attempt=1, bytes=32, covered_by="masks")
    last, closing = (line for line in said(silo, "audit", "report").splitlines() if line.endswith("masks"))
    assert "closing" not in last
    assert closing.endswith("closing round, without training, masks")


def test_the_report_has_all_that_people_allowed(silo: SiloFolder) -> None:
    rules(silo, "require_secure_aggregation = true")
    credentials = load_credentials(silo)
    said(silo, "pause")
    assert "decided by people: nothing" in said(silo, "audit", "report")
    offered(silo, MASKED)
    said(silo, "plan", "approve", MASKED.plan.digest, UNCOMPARED)
    journal = masking_journal(silo, credentials)
    journal.remember(SiloMemory().joined(attempt(plan=bytes.fromhex(DIGEST))))
    (silo.masking / "memory").unlink()
    said(silo, "trust", "reset-memory", ALTHOUGH)
    said(silo, "plan", "approve", MASKED.plan.digest, UNCOMPARED, "--although", DIGEST)
    for name in (BANK, CLINIC):
        said(silo, "trust", "add", name, text_of(new_identity_key(), name))
    alone = first_link(FEDERATION, Partition.of([[BANK], [CLINIC], [HOSPITAL]]))
    policy = SiloPolicy(rules=PolicyRules(require_secure_aggregation=True), silo=HOSPITAL)
    group_chain(silo, credentials, policy).take(GroupsOffer(links=(), proposed=SignedLink(link=alone), identities=()))
    said(silo, "groups", "approve", alone.digest.hex())
    with audited(silo, credentials) as log:
        log.append(Event.GROUPS_WITHDRAWN, digest=alone.digest.hex(), groups="bank-b | clinic-c")

    text = said(silo, "audit", "report")
    decided = text[text.index("decided by people:") : text.index("trust:")].splitlines()[1:]
    plan, memory, pair, groups, withdrawn = decided
    assert f"plan approved: small ({MASKED.plan.digest[:16]}), initial model not compared" in plan
    assert f"initial model not compared, although this silo masked under {DIGEST[:16]}" in pair
    assert "memory reset: masking/memory is missing" in memory
    assert f"release groups approved: bank-b; clinic-c; hospital-a ({alone.digest.hex()[:16]}); " in groups
    assert f"release groups withdrawn: bank-b | clinic-c ({alone.digest.hex()[:16]})" in withdrawn
    assert len(json.loads(said(silo, "audit", "report", "--json"))["decisions"]) == 5


@pytest.fixture
def hangups() -> Iterator[list[int]]:
    """The SIGHUPs that this process gets, as an agent's process would."""
    got: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _frame: got.append(number))
    yield got
    signal.signal(signal.SIGHUP, before)


def test_the_running_agent_is_told_of_an_approval(silo: SiloFolder, hangups: list[int]) -> None:
    rules(silo, 'approved_plans = "ask"')
    offered(silo)
    with ProcessLock(silo.lock, "silo agent"):
        done = said(silo, "plan", "approve", DIGEST)
    assert done == f"plan small {DIGEST} is approved; the running agent (process {os.getpid()}) was told\n"
    assert hangups == [signal.SIGHUP]


def test_an_agent_that_is_starting_is_not_ended_by_word_of_an_approval(silo: SiloFolder, hangups: list[int]) -> None:
    """Between taking its lock and listening to signals it can be found and told; it reads what was decided later."""
    done = agent(silo, "start", "--data", silo.root / "absent")
    assert done.code == EXIT_CODES[DataError]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_commands_that_only_look_load_nothing_heavy(silo: SiloFolder) -> None:
    offered(silo)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for arguments in (["trust", "own"], ["trust", "list"], ["plan", "show"], ["plan", "approve", DIGEST]):
        script = (
            f"import sys; from silo_agent.cli import main; sys.argv[1:] = {[*arguments, '--dir', str(silo.root)]!r}\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end\n"
            "print(sorted({'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr.splitlines()[-1] == "[]", (arguments, done.stderr)


# --- check
# -------------------------------------------------------------------------------------------------------------


def pins_checked(silo: SiloFolder, **policy: object) -> Check:
    ground = Ground(
        folder=silo,
        settings=lambda enrolled: Settings.model_validate({"policy": policy}),
        sources=lambda settings: SiloSources(settings, scratch=silo.root / "database"),
        now=lambda: datetime.now(UTC),
    )
    (check,) = (one for one in asyncio.run(preflight(ground)) if one.name == "pinned silos")
    return check


def test_check_finds_too_few_pins_where_policy_or_plan_asks_for_masks(silo: SiloFolder) -> None:
    assert pins_checked(silo).outcome is Outcome.SKIPPED
    missing = pins_checked(silo, require_secure_aggregation=True)
    assert missing.outcome is Outcome.FAILED
    assert "0 silos are pinned" in missing.detail
    assert "takes 2 beside this one" in missing.detail
    assert "silo-agent trust add NAME KEY" in missing.detail

    for name in (BANK, CLINIC):
        said(silo, "trust", "add", name, text_of(new_identity_key(), name))
    assert pins_checked(silo, require_secure_aggregation=True).outcome is Outcome.PASSED
    assert pins_checked(silo, require_secure_aggregation=True, min_cohort=4).outcome is Outcome.FAILED
    offered(silo, MASKED)
    assert "takes 3 beside this one" in pins_checked(silo).detail


def test_check_says_what_trust_on_first_use_does_not_stop(silo: SiloFolder) -> None:
    check = pins_checked(silo, require_secure_aggregation=True, trust_on_first_use=True)
    assert check.outcome is Outcome.PASSED
    assert "does not stop a coordinator that makes up silos" in check.detail


def test_check_counts_no_pin_of_first_use_where_the_policy_has_that_no_more(silo: SiloFolder) -> None:
    store = trust_store(silo, load_credentials(silo), first_use=True)
    for name in (BANK, CLINIC):
        store.trusted_on_first_use(name, new_identity_key().public_key())
    assert pins_checked(silo, require_secure_aggregation=True, trust_on_first_use=True).outcome is Outcome.PASSED
    check = pins_checked(silo, require_secure_aggregation=True)
    assert check.outcome is Outcome.FAILED
    assert "2 silos are pinned, 2 of them on first use, who count for nothing until people compare them" in check.detail


def test_check_names_damaged_pins(silo: SiloFolder) -> None:
    silo.peers.write_text("{")
    silo.peers.chmod(0o600)
    check = pins_checked(silo, require_secure_aggregation=True, trust_on_first_use=True)
    assert check.outcome is Outcome.FAILED
    assert str(silo.peers) in check.detail
