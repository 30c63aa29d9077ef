"""Plans on disk: those that run, the refused one that people look at, and what people approved."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lorica_security.errors import ConfigurationError
from lorica_security.identity.seal import Seal, unsealed
from silo_agent.edges.disk.plan_approvals import PlanApprovals
from silo_agent.edges.disk.plan_store import PlanStore
from silo_wire.canonical import Digest
from tests.support.federation_peer import small_bundle
from tests.support.secagg_federation import identity_key

ONE, TWO, THREE = (small_bundle(seed=seed) for seed in (1, 2, 3))
SEAL = Seal(identity_key("silo-00"))
NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)


def digests(store: PlanStore) -> list[Digest]:
    return [bundle.plan.digest for bundle in store.bundles()]


def test_a_refused_plan_is_kept_and_found_by_its_digest(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    assert store.refused() is None
    store.keep_refused(ONE)
    for bundle in (store.refused(), store.load(ONE.plan.digest)):
        assert bundle is not None
        assert bundle.plan == ONE.plan
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


def test_attack_coordinator_that_offers_plan_after_plan_does_not_fill_the_disk(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    for seed in range(10):
        store.keep_refused(small_bundle(seed=seed))
    assert len(list(tmp_path.iterdir())) == 1
    assert digests(store) == [small_bundle(seed=9).plan.digest]


def test_a_plan_that_does_not_parse_is_set_aside_and_told_of(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.save(ONE)
    file = tmp_path / f"{ONE.plan.digest}.plan"
    damaged = file.read_bytes()[:-1]
    file.write_bytes(damaged)
    with capture_logs() as told:
        assert store.load(ONE.plan.digest) is None
        assert store.load(ONE.plan.digest) is None
    aside = tmp_path / f"{ONE.plan.digest}.plan.unread"
    assert aside.read_bytes() == damaged
    assert [(line["event"], line["file"]) for line in told] == [("plan set aside", str(aside))]
    assert digests(store) == []
    store.save(ONE)
    assert digests(store) == [ONE.plan.digest]


def test_a_plan_that_was_approved_is_no_longer_the_refused_one(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.keep_refused(ONE)
    store.save(ONE)
    assert store.refused() is None
    assert digests(store) == [ONE.plan.digest]


def test_a_plan_that_is_allowed_is_offered_in_place_of_the_refused_one(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.keep_refused(ONE)
    store.save(TWO)
    assert store.refused() is None
    assert store.load(ONE.plan.digest) is None


def test_a_plan_that_ran_and_is_refused_now_stays_for_its_model(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    store.save(ONE)
    store.keep_refused(ONE)
    store.keep_refused(TWO)
    assert store.load(ONE.plan.digest) is not None
    refused = store.refused()
    assert refused is not None
    assert refused.plan.digest == TWO.plan.digest


def test_plans_are_listed_once_and_the_newest_last(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    for bundle in (ONE, TWO):
        store.save(bundle)
    store.keep_refused(THREE)
    for age, digest in enumerate((TWO.plan.digest, ONE.plan.digest, THREE.plan.digest)):
        for path in tmp_path.glob(f"{digest}.*"):
            os.utime(path, (age, age))
    assert digests(store) == [TWO.plan.digest, ONE.plan.digest, THREE.plan.digest]
    store.keep_refused(TWO)
    assert digests(store) == [ONE.plan.digest, TWO.plan.digest]


@pytest.mark.parametrize("suffix", ["plan", "refused"])
def test_attack_plan_that_was_changed_on_disk_is_not_shown_for_approval(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"{ONE.plan.digest}.{suffix}"
    path.write_bytes(TWO.encode())
    store = PlanStore(tmp_path)
    assert store.refused() is None
    assert store.bundles() == []
    assert store.load(ONE.plan.digest) is None
    assert not path.exists()


# --- approvals
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def approvals(tmp_path: Path) -> PlanApprovals:
    return PlanApprovals(tmp_path / "approvals.json", SEAL, now=lambda: NOW)


def test_an_approval_is_by_digest_private_and_lasting(approvals: PlanApprovals, tmp_path: Path) -> None:
    assert list(approvals.record().approved) == []
    approvals.approve(ONE.plan.digest, name="small")
    approvals.approve(TWO.plan.digest)
    path = tmp_path / "approvals.json"
    assert set(PlanApprovals(path, SEAL).record().approved) == {ONE.plan.digest, TWO.plan.digest}
    assert path.stat().st_mode & 0o777 == 0o600
    written = json.loads(unsealed(path.read_bytes()))["plans"]
    assert written[ONE.plan.digest] == {
        "name": "small",
        "approved_at": "2026-11-21T03:00:00Z",
        "model": "not compared",
        "although": [],
        "of_pair_alone": False,
    }


def test_the_first_approval_of_a_plan_stays(approvals: PlanApprovals, tmp_path: Path) -> None:
    approvals.approve(ONE.plan.digest, name="small")
    written = (tmp_path / "approvals.json").read_bytes()
    PlanApprovals(tmp_path / "approvals.json", SEAL).approve(ONE.plan.digest, name="other")
    assert (tmp_path / "approvals.json").read_bytes() == written


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"version": 2}', b'{"plans": {"abc": {"approved_at": "2026-11-21T03:00:00Z"}}}', b'{"x": 1}']
)
def test_damaged_approvals_are_named_and_approve_nothing(approvals: PlanApprovals, tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "approvals.json"
    raw = SEAL.sealed(path.name, raw)
    path.write_bytes(raw)
    path.chmod(0o600)
    for call in (approvals.record, lambda: approvals.approve(ONE.plan.digest)):
        with pytest.raises(ConfigurationError, match=r"approvals\.json is damaged .* approve the plans again"):
            call()
    assert path.read_bytes() == raw


def test_attack_approvals_that_somebody_wrote_who_has_not_the_identity_key_approve_nothing(
    approvals: PlanApprovals, tmp_path: Path
) -> None:
    """So does a file of an earlier release, which had no seal."""
    path = tmp_path / "approvals.json"
    approvals.approve(ONE.plan.digest)
    content = path.read_bytes()
    path.write_bytes(content.replace(ONE.plan.digest.encode(), TWO.plan.digest.encode()))
    with pytest.raises(ConfigurationError, match=r"the seal .* it was edited.* approve the plans again"):
        approvals.record()
    path.write_bytes(unsealed(content))
    with pytest.raises(ConfigurationError, match=r"no seal .* approve the plans again"):
        approvals.record()
    path.unlink()
    assert approvals.record().approved == []


def test_attack_another_user_may_have_written_the_approvals(approvals: PlanApprovals, tmp_path: Path) -> None:
    approvals.approve(ONE.plan.digest)
    (tmp_path / "approvals.json").chmod(0o666)
    with pytest.raises(ConfigurationError, match="mode 0666"):
        approvals.record()
