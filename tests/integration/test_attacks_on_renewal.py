"""Certificates that are renewed while everything goes on, against the real coordinator; and whoever would profit from
that."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_coordinator.rounds.states import Collecting
from lorica_coordinator.service.members.renewal import RENEWALS_AN_HOUR
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    IntegrityError,
    MalformedMessage,
    Unreachable,
)
from lorica_security.host import files
from lorica_security.identifiers import FederationName, Identity, Role, coordinator_dns_name
from lorica_security.identity.endorsement import endorse_renewal, endorse_request
from lorica_security.identity.identity_key import new_identity_key, sign
from lorica_security.pkcs11_keys.reference import tls_key_in_token
from lorica_security.pki.authority import Authority
from lorica_security.pki.authority_succession import certificate_digest
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.keys.key_store import load_credentials, store_tls
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.certificate import checked
from silo_agent.edges.wire.tls_probe import probe
from silo_agent.service.certificate_keeper import CertificateKeeper
from silo_wire.canonical import digest_to_wire
from silo_wire.codecs.renewal import RenewalAnswer, renewal_request
from silo_wire.codecs.updates_codec import update_header_to_wire
from silo_wire.messages import Prepare, Standby, Train
from silo_wire.statements import TRUST_DOMAIN, trust_statement
from silo_wire.v1 import operator_pb2
from tests.support import soft_hsm
from tests.support.certificates import forge, uri
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    FederationTemplate,
    RunningCoordinator,
    Silo,
    chunk_pieces,
    header_piece,
    refused,
    running,
    until,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.lifecycle import kept_agent, silo_at

HOSPITAL_IDENTITY = Identity(FEDERATION, Role.SILO, HOSPITAL)


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(federation_template.copy(tmp_path / "coordinator"), offer="default") as coordinator:
        yield coordinator


# --- what goes on ---------------------------------------------------------------------------------------------------


async def test_a_renewal_drops_no_round_and_no_transfer(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """While its update is half-way a silo gets a new certificate: the upload ends where it began, new calls go
    elsewhere."""
    plan = at.coordinator.shelf.bundle(at.coordinator.shelf.compile("default").plan.digest)
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    before = load_credentials(folder)
    async with kept_agent(folder) as agent, Silo(at, before) as by_hand:
        await agent.order(Prepare)
        await agent.coordinator.declare_readiness(plan.plan.digest, ready=True, reason="")
        async with Silo(at, federation_template.silos[BANK]) as bank:
            await bank.join(plan.plan.digest)
            train = await agent.order(Train)
            update = by_hand.update(train, plan.update_layout)
            wire = agent.coordinator._wire
            half_way, go_on = asyncio.Event(), asyncio.Event()

            async def upload() -> bytes:
                async with wire.used():
                    call = wire.stub.UploadUpdate(timeout=PATIENCE_S)
                    await call.write(header_piece(update_header_to_wire(update.header, HOSPITAL)))
                    await call.initial_metadata()
                    first, *others = chunk_pieces(update.chunks)
                    await call.write(first)
                    half_way.set()
                    await go_on.wait()
                    for piece in others:
                        await call.write(piece)
                    await call.done_writing()
                    return bytes((await call).update_digest)

            uploading = asyncio.create_task(upload())
            await half_way.wait()
            seats = len(agent.orders)
            await agent.certificate.renew()
            assert agent.coordinator._wire is not wire
            await agent.until(lambda: len(agent.orders) > seats)  # the stream of orders is open over the new channel
            assert wire.users == 1  # the upload alone keeps the old one
            go_on.set()
            assert await uploading == digest_to_wire(update.header.manifest.digest)
            await agent.order(Standby)
            await wire.unused.wait()
        state = at.service._loop.state
        assert isinstance(state, Collecting)
        assert HOSPITAL in state.course.ready
        assert [item.silo for item in state.updates] == [HOSPITAL]
        assert agent.problems == []

    after = load_credentials(folder)
    assert after.tls_key_pem != before.tls_key_pem
    assert after.identity_key.private_bytes_raw() == before.identity_key.private_bytes_raw()
    store = at.coordinator.open_store()
    try:
        (enrolled,) = (silo for silo in store.silos() if silo.silo == HOSPITAL)
    finally:
        store.close()
    assert enrolled.certificate_serial == f"{after.certificate.serial_number:x}"
    assert enrolled.certificate_expires_unix_s == after.certificate.not_valid_after_utc.timestamp()


@pytest.mark.skipif(not soft_hsm.CAN, reason=soft_hsm.WHY_NOT)
async def test_a_key_in_a_token_is_renewed_for_and_connects(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """It stays, and each renewal brings another certificate for it; the second one comes over a connection of it."""
    soft_hsm.tokens()
    key = tls_key_in_token(soft_hsm.uri("silo", "tls", soft_hsm.pin_file(tmp_path / "pin")), tmp_path / "silo")
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    serials = {load_credentials(folder).certificate.serial_number}
    async with kept_agent(folder) as agent:
        await agent.order(Prepare)
        agent.certificate._credentials = replace(load_credentials(folder), tls_key=key)
        for _ in range(2):
            seats = len(agent.orders)
            await agent.certificate.renew()
            await agent.until(lambda seats=seats: len(agent.orders) > seats)
            after = load_credentials(folder)
            assert after.tls_key.public_key() == key.public_key() == after.certificate.public_key()
            serials.add(after.certificate.serial_number)
        assert agent.problems == []
    assert len(serials) == 3


async def test_an_agent_renews_by_itself_when_two_thirds_are_over(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    old = load_credentials(folder)
    now = datetime.now(UTC)
    begin, end = now - timedelta(days=5), now + timedelta(days=2)
    names = [uri(HOSPITAL_IDENTITY.uri)]
    aged = parse_certificate(forge(at.coordinator.keys.authority, names, begin=begin, end=end, key=old.tls_key))
    store_tls(folder, replace(old, certificate=aged))
    await at.service.register.add(register_entry(aged, begin))
    async with kept_agent(folder) as agent:
        await agent.until(lambda: agent.times("certificate-renewed") == 1)
        assert agent.stored.certificate.not_valid_after_utc > datetime.now(UTC) + timedelta(days=6)
        await agent.order(Prepare)


async def test_the_coordinators_own_certificate_is_renewed_while_it_serves(at: RunningCoordinator) -> None:
    """Who is connected stays so; who connects next meets another certificate; TLS 1.2 stays off."""
    keys = at.coordinator.keys
    name = coordinator_dns_name(FEDERATION)
    shown = (await asyncio.to_thread(probe, at.address, name)).certificate
    async with at.operator() as operator:
        async with asyncio.timeout(PATIENCE_S):
            await operator.GetStatus(operator_pb2.GetStatusRequest())
            (keys.folder / "server-pair.pem").unlink()  # as if it were due
            for changed in at.service.renewal.on_change:
                changed()
            while (await asyncio.to_thread(probe, at.address, name)).certificate == shown:
                await asyncio.sleep(0)
            await operator.GetStatus(operator_pb2.GetStatusRequest())
    expires = parse_certificate((await asyncio.to_thread(probe, at.address, name)).certificate).not_valid_after_utc
    metric = at.metrics.registry.get_sample_value("lorica_certificate_expiry_timestamp_seconds")
    assert metric == expires.timestamp()
    assert (at.metrics.registry.get_sample_value("lorica_authority_expiry_timestamp_seconds") or 0) > metric


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("instant", ["before", "after"])
async def test_a_kill_as_the_renewed_certificate_is_written_leaves_a_silo_that_connects(
    at: RunningCoordinator,
    federation_template: FederationTemplate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instant: str,
) -> None:
    """The coordinator has issued another certificate: the one before is as good, and renews."""
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    before = load_credentials(folder).certificate
    real = files.replace

    def killed(*arguments: object, **how: object) -> None:
        if instant == "after":
            real(*arguments, **how)  # type: ignore[arg-type]
        raise Killed

    async with kept_agent(folder, attend=False) as agent:
        with monkeypatch.context() as patch:
            patch.setattr(files, "replace", killed)
            with pytest.raises(Killed):
                await agent.certificate.renew()
    assert (load_credentials(folder).certificate == before) is (instant == "before")
    async with kept_agent(folder) as agent:
        await agent.order(Prepare)
        await agent.certificate.renew()
        expires = agent.stored.certificate.not_valid_after_utc.timestamp()
    name, labels = "lorica_enrolled_silo_certificate_expiry_timestamp_seconds", {"silo": HOSPITAL}
    await until(lambda: at.metrics.registry.get_sample_value(name, labels) == expires)


# --- who may not ------------------------------------------------------------------------------------------------------


async def test_stolen_tls_key_without_the_identity_key_renews_nothing(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    stolen = federation_template.silos[HOSPITAL]
    request = certificate_request(new_tls_key(), HOSPITAL_IDENTITY)
    async with Silo(at, stolen) as thief:
        for endorsement in (
            endorse_renewal(new_identity_key(), request=request, identity=HOSPITAL_IDENTITY),
            bytes(64),
            b"",
            # What the identity key signed for its enrolment is no renewal.
            endorse_request(stolen.identity_key, request=request, identity=HOSPITAL_IDENTITY),
        ):
            message = renewal_request(federation=FEDERATION, silo=HOSPITAL, csr_der=request, endorsement=endorsement)
            async with refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "renewal/endorse-request"):
                await thief.stub.RenewCertificate(message)


async def test_endorsement_of_one_request_does_not_renew_for_another_key(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    credentials = federation_template.silos[HOSPITAL]
    endorsed, other = (certificate_request(new_tls_key(), HOSPITAL_IDENTITY) for _ in range(2))
    endorsement = endorse_renewal(credentials.identity_key, request=endorsed, identity=HOSPITAL_IDENTITY)
    message = renewal_request(federation=FEDERATION, silo=HOSPITAL, csr_der=other, endorsement=endorsement)
    async with (
        Silo(at, credentials) as silo,
        refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "does not match"),
    ):
        await silo.stub.RenewCertificate(message)


async def test_silo_that_renews_in_a_loop_is_told_to_wait(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    """Each certificate is a row, a line of the audit log and a place in memory for a month."""
    credentials = federation_template.silos[HOSPITAL]
    request = certificate_request(new_tls_key(), HOSPITAL_IDENTITY)
    endorsement = endorse_renewal(credentials.identity_key, request=request, identity=HOSPITAL_IDENTITY)
    message = renewal_request(federation=FEDERATION, silo=HOSPITAL, csr_der=request, endorsement=endorsement)
    registered = len(at.service.register.certificates())
    async with Silo(at, credentials) as silo:
        for _ in range(RENEWALS_AN_HOUR):
            await silo.stub.RenewCertificate(message)
        async with refused(at, Unreachable, grpc.StatusCode.UNAVAILABLE, "renewals of its certificate"):
            await silo.stub.RenewCertificate(message)
    async with Silo(at, federation_template.silos[BANK]) as bank:
        request = certificate_request(new_tls_key(), bank.credentials.identity)
        endorsement = endorse_renewal(
            bank.credentials.identity_key, request=request, identity=bank.credentials.identity
        )
        await bank.stub.RenewCertificate(
            renewal_request(federation=FEDERATION, silo=BANK, csr_der=request, endorsement=endorsement)
        )
    assert len(at.service.register.certificates()) == registered + RENEWALS_AN_HOUR + 1


async def test_silo_that_renews_in_the_name_of_another(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    bank = federation_template.silos[BANK]
    for name in (HOSPITAL_IDENTITY, Identity(FEDERATION, Role.OPERATOR, "olga")):
        request = certificate_request(new_tls_key(), name)
        endorsement = endorse_renewal(bank.identity_key, request=request, identity=bank.identity)
        message = renewal_request(federation=FEDERATION, silo=BANK, csr_der=request, endorsement=endorsement)
        async with (
            Silo(at, bank) as silo,
            refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "is for spiffe://"),
        ):
            await silo.stub.RenewCertificate(message)


async def test_expired_certificate_renews_nothing_and_the_agent_says_what_to_do(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    credentials = load_credentials(folder)
    now = datetime.now(UTC) - timedelta(seconds=2)
    expired = at.coordinator.keys.authority.issue(
        credentials.tls_key.public_key(), HOSPITAL_IDENTITY, now=now, lifetime=timedelta(seconds=1)
    )
    store_tls(folder, replace(credentials, certificate=expired))
    async with kept_agent(folder, attend=False) as agent:
        await agent.until(lambda: agent.times("certificate-not-renewed") > 1)
        for _, fields in agent.notes:
            assert "set the clock if it is wrong; else have the operator run `coordinator invite`" in fields["detail"]
        assert not agent.keeping.done(), "it cannot know whether its clock is right"
        assert agent.stored.certificate == expired


# --- what the agent takes
# -----------------------------------------------------------------------------------------------


def answer_of(
    at: RunningCoordinator, key: object, trust: TrustBundle, *, since: int = 1000, **changes: object
) -> RenewalAnswer:
    certificate = at.coordinator.keys.authority.issue(key, HOSPITAL_IDENTITY, now=datetime.now(UTC))  # type: ignore[arg-type]
    statement = trust_statement(
        federation=FEDERATION, trust=trust.digest, since=since, certificate=certificate_digest(certificate)
    )
    values = {
        "certificate_pem": certificate.public_bytes(Encoding.PEM),
        "trust": trust,
        "since": since,
        "signature": at.coordinator.keys.sign(TRUST_DOMAIN, statement),
        **changes,
    }
    return RenewalAnswer(**values)  # type: ignore[arg-type]


async def test_trust_bundle_without_the_coordinators_signature_is_refused(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    """Whoever holds an authority's key can stand in the middle of TLS: it cannot slip in an authority of its own."""
    who, key, now = federation_template.silos[HOSPITAL], new_tls_key(), datetime.now(UTC)
    trust = at.coordinator.keys.trust
    evil = Authority.create(FEDERATION, now=now).certificate
    with_evil = TrustBundle((*trust.authorities, evil))
    other_federation = Authority.create(FederationName("other-net"), now=now).certificate
    foreign = TrustBundle((*trust.authorities, other_federation))
    honest = answer_of(at, key.public_key(), trust)
    statement = trust_statement(
        federation=FEDERATION,
        trust=with_evil.digest,
        since=honest.since,
        certificate=certificate_digest(parse_certificate(honest.certificate_pem)),
    )
    assert checked(who, key, honest, now=now).trust == trust
    for lie, error in (
        (replace(honest, trust=with_evil), IntegrityError),  # signed, but another bundle
        (replace(honest, trust=with_evil, signature=bytes(64)), IntegrityError),
        (
            replace(
                honest,
                trust=with_evil,
                signature=sign(new_identity_key(), domain=TRUST_DOMAIN.encode(), payload=statement),
            ),
            IntegrityError,
        ),
        (
            replace(honest, trust=with_evil, signature=at.coordinator.keys.sign("round-model", statement)),
            IntegrityError,
        ),
        (answer_of(at, key.public_key(), foreign), MalformedMessage),
        (answer_of(at, new_tls_key().public_key(), trust), IntegrityError),
        (answer_of(at, key.public_key(), TrustBundle((evil,))), AuthenticationError),
    ):
        with pytest.raises(error):
            checked(who, key, lie, now=now)


async def test_an_older_trust_bundle_is_refused_though_it_is_signed(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Whoever has an authority's key keeps signed answers of before a rotation, to hold a silo back from its
    successor."""
    keys, now, key = at.coordinator.keys, datetime.now(UTC), new_tls_key()
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    old = keys.trust
    async with kept_agent(folder) as agent:
        async with at.operator() as operator:
            await operator.ChangeAuthority(operator_pb2.ChangeAuthorityRequest(step="rotate"))
        await agent.until(lambda: agent.times("certificate-renewed") >= 1)
    who = load_credentials(folder)
    assert (who.trust, who.trusted_since) == keys.authorities.trusted
    older = answer_of(at, key.public_key(), old, since=who.trusted_since - 1)
    with pytest.raises(IntegrityError, match="put back from a backup, or somebody holds back"):
        checked(who, key, older, now=now)
    for since in (who.trusted_since, who.trusted_since + 1):
        assert (
            checked(who, key, answer_of(at, key.public_key(), who.trust, since=since), now=now).trusted_since == since
        )


async def test_answer_that_was_given_before_is_no_answer_to_another_request(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    """Its signature is over the certificate: none that the thief of an authority's key made goes with it, and none of
    its age."""
    who, key, now = federation_template.silos[HOSPITAL], new_tls_key(), datetime.now(UTC)
    given = answer_of(at, new_tls_key().public_key(), who.trust)
    forged_answer = answer_of(at, key.public_key(), who.trust)
    checked(who, key, forged_answer, now=now)
    for replayed in (
        replace(forged_answer, signature=given.signature),
        replace(forged_answer, since=forged_answer.since + 1),
    ):
        with pytest.raises(IntegrityError):
            checked(who, key, replayed, now=now)
    with pytest.raises(IntegrityError, match="another key"):
        checked(who, key, given, now=now)


def test_trust_bundles_are_each_younger_than_the_one_before(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Also within a second, with a clock that was set back, and after a restart."""
    keys = Authorities.load(federation_template.copy(tmp_path / "coordinator").keys)
    ages = [keys.trusted[1]]
    now = datetime.now(UTC)
    keys.rotate(now)
    ages.append(keys.trusted[1])
    keys.activate()
    assert keys.trusted[1] == ages[-1]  # the same bundle
    keys.retire("ca", now - timedelta(days=900))
    ages.append(keys.trusted[1])
    assert ages == sorted(set(ages))
    assert Authorities.load(tmp_path / "coordinator" / "keys").trusted[1] == ages[-1]


async def test_a_coordinator_that_always_names_another_bundle_does_not_make_a_silo_renew_without_end(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Each renewal that helped nothing is followed by a longer wait."""
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    waits: list[float] = []

    class Counted(Backoff):
        def wait_s(self) -> float:
            waits.append(super().wait_s())
            return 0.0

    async with kept_agent(folder, attend=False) as agent:
        renewed = asyncio.Event()

        def told(event: str, **fields: object) -> None:
            if len(waits) == 5:
                renewed.set()

        keeper = CertificateKeeper(
            agent.certificate, backoff=Counted(first_s=10, most_s=100), told=told, expires=lambda at: None
        )
        keeper.heard(bytes(32))
        running_keeper = asyncio.create_task(keeper.run())
        async with asyncio.timeout(PATIENCE_S):
            await renewed.wait()
        running_keeper.cancel()
    assert waits[4] >= 10  # between a tenth and all of 100
