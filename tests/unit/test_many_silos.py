"""What a federation of hundreds of silos costs beside its training: counted in lines run, files read and digests made,
never in seconds."""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console
from support.tiny_t5 import bundle_of, random_model

from lorica.simulation.direct_coordinator import SharedModels
from lorica.simulation.model_files import KeptModel
from lorica.simulation.report import SHOWN_SILOS, print_end, print_round
from lorica.simulation.simulated import ROUNDS_FILE, Simulated, write
from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.service.records import SiloRow
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.identity.succession import Succession, succession_statement
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.pins_file import Peers
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.canonical import Digest
from silo_wire.codecs.groups_codec import GroupsOffer, KnownIdentity
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import PlanBundle
from tests.support.federation_peer import SILO, TestNet
from tests.support.round_rows import applied_round

KEYS = {SiloName(f"ward-{number}"): new_identity_key().public_key() for number in range(80)}


def some(count: int) -> dict[SiloName, Any]:
    return dict(list(KEYS.items())[:count])


@pytest.fixture(scope="module")
def credentials() -> SiloCredentials:
    return TestNet.create().credentials("127.0.0.1:1", SILO)


def folder_in(path: Path) -> SiloFolder:
    folder = SiloFolder(path)
    folder.make()
    return folder


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of the silo agent's own code `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if "silo_agent" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_pinning_a_federation_grows_as_its_silos(tmp_path: Path, credentials: SiloCredentials) -> None:
    """Four times the silos are four times the lines; where each pin looked at all before it, there were nine times."""
    few, many = (
        lines_run(lambda count=count: trust_store(folder_in(tmp_path / str(count)), credentials).add_all(some(count)))  # type: ignore[misc]
        for count in (20, 80)
    )
    assert few < many < 4.5 * few


@contextmanager
def pins_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a file of pins is read within: one number, counted up."""
    read, times = PrivateRecord.read, [0]

    def counted(self: Any, **more: Any) -> Any:
        times[0] += self._kind is Peers
        return read(self, **more)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateRecord, "read", counted)
        yield times


class Offering:
    """A coordinator that says whose keys it knows."""

    def __init__(self, count: int, *more: KnownIdentity) -> None:
        identities = tuple(KnownIdentity(silo=silo, key=key) for silo, key in some(count).items())
        self.offer = GroupsOffer(links=(), proposed=None, identities=(*identities, *more))

    async def fetch_groups(self, after: int, **held: Any) -> GroupsOffer:
        return self.offer

    async def sign_groups(self, link: bytes, signature: bytes) -> None:
        raise AssertionError("nothing is proposed")


def test_pins_are_read_as_often_for_many_silos_as_for_few(
    tmp_path: Path, credentials: SiloCredentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = SiloPolicy(rules=PolicyRules(), silo=SILO)
    counts = []
    for count in (5, 40):
        folder = folder_in(tmp_path / str(count))
        store = trust_store(folder, credentials)
        store.add_all(some(count))
        groups = ReleaseGroups(group_chain(folder, credentials, policy), store, credentials, client=Offering(count))
        with pins_read(monkeypatch) as times:
            asyncio.run(groups.sync())
        counts.append(times[0])
    assert counts[0] == counts[1] > 0


def test_a_key_that_is_not_the_pinned_one_is_still_looked_at(tmp_path: Path, credentials: SiloCredentials) -> None:
    """First use, and a successor that the pinned key named, beside others that are pinned already."""
    folder, rotates, old, new = folder_in(tmp_path), SiloName("rotates"), new_identity_key(), new_identity_key()
    store = trust_store(folder, credentials, first_use=True)
    store.add_all({**some(4), rotates: old.public_key()})
    statement = succession_statement(
        old, identity=Identity(credentials.federation, Role.SILO, rotates), new_key=new.public_key()
    )
    step = Succession(predecessor=old.public_key(), successor=new.public_key(), statement=statement)
    moved = KnownIdentity(silo=rotates, key=new.public_key(), successions=(step,))
    offering = Offering(6, moved)
    policy = SiloPolicy(rules=PolicyRules(trust_on_first_use=True), silo=SILO)
    chain = group_chain(folder, credentials, policy)
    asyncio.run(ReleaseGroups(chain, store, credentials, client=offering, first_use=True).sync())
    assert store.identities() == {**some(6), rotates: new.public_key()}


def test_the_trust_bundle_is_digested_once_for_all_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew when another authority joins."""
    now, digest, made = datetime.now(UTC), TrustBundle.digest, [0]
    Authorities.create(tmp_path, FederationName("north"), now)
    authorities = Authorities.load(tmp_path)

    def counted(self: TrustBundle) -> bytes:
        made[0] += 1
        return digest.fget(self)  # type: ignore[attr-defined, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(TrustBundle, "digest", property(counted))
        first = {authorities.trust_digest for _ in range(20)}
        assert made == [1]
        assert first == {authorities.trust.digest}
        authorities.rotate(now)
        assert authorities.trust_digest == authorities.trust.digest
        assert authorities.trust_digest not in first


def test_a_plan_is_parsed_once_for_all_silos(tmp_path: Path) -> None:
    bundle, shared = bundle_of(random_model(2)), SharedModels(tmp_path / "models", KeptModel(tmp_path / "kept"))
    raw, digest = bundle.encode(), bundle.plan.digest
    first = shared.plan(raw, digest)
    assert first.plan == PlanBundle.decode(raw, digest).plan
    assert shared.plan(raw, digest) is first


@pytest.mark.parametrize("count", [SHOWN_SILOS, SHOWN_SILOS + 1, 250])
def test_a_round_is_one_line_however_many_silos_trained(count: int) -> None:
    silos = tuple(
        SiloRow(silo=SiloName(f"ward-{number}"), outcome="committed", examples=3, loss_max=number / 100, share=0.01)
        for number in range(count)
    )
    console = Console(width=80, record=True)
    row = applied_round(round=2, silos=silos)
    print_round(console, row, score="ROUGE-L")
    (line,) = console.export_text().splitlines()
    assert line.startswith("round 2 applied: loss reduction")
    if count > SHOWN_SILOS:
        assert f"of {count} silos 0.000 to {(count - 1) / 100:.3f}" in line
        assert len(line) < 120
    else:
        assert all(f"ward-{number} {number / 100:.3f} (1%)" in line for number in range(count))


@pytest.mark.parametrize("executed", [0, 4])
def test_the_table_at_the_end_has_a_column_of_execution_where_something_was_executed(
    tmp_path: Path, executed: int
) -> None:
    """Of text no answer runs."""
    scores = Evaluation(
        split="dev",
        examples=8,
        exact_matches=2,
        executed=executed,
        execution_matches=executed // 2,
        loss_per_token=1.5,
        seconds=1.0,
    )
    row = applied_round(
        silos=(SiloRow(silo=SILO, outcome="committed", examples=1, evaluation=scores),),
        macro_exact_match=0.25,
        micro_exact_match=0.25,
    )
    done = Simulated(
        coordinator=None,  # type: ignore[arg-type]  # neither is asked for what is shown
        kept=None,  # type: ignore[arg-type]
        losses={},
        plan=Digest("b" * 64),
        rows=(row,),
        best=Digest("a" * 64),
        final=Digest("a" * 64),
        seconds=1.0,
    )
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    print_end(console, done, tmp_path, score="ROUGE-L")
    shown = console.export_text()
    assert ("execution" in shown, "50.0%" in shown) == (bool(executed), bool(executed))
    assert all(told in shown for told in ("ROUGE-L", "25.0%", "1.500", "MacroAvg"))
    write(tmp_path, done, score="ROUGE-L")
    (line,) = (tmp_path / ROUNDS_FILE).read_text().splitlines()
    assert (json.loads(line)["score"], json.loads(line)["macro_exact_match"]) == ("ROUGE-L", 0.25)
