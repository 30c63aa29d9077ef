"""Who was shut out stays out, and who was let in from elsewhere may do what its role says: against the real
listeners."""

import asyncio
import gc
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from structlog.testing import capture_logs
from typer.testing import CliRunner

from lorica_coordinator.cli import app
from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_coordinator.edges.models import export
from lorica_coordinator.edges.operator_host.access_folder import AccessFolder, granted_text
from lorica_coordinator.edges.server.gate import OF_ONE_CALLER, _OpenCall
from lorica_coordinator.edges.server.places import Place
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import Aggregating, Collecting
from lorica_coordinator.service.callers.silos import ModelSource
from lorica_security.audit.entry import Event
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    ConfigurationError,
    Conflict,
    IntegrityError,
    LoricaError,
    OutsideValidity,
    StateError,
    Unreachable,
)
from lorica_security.host import files, key_file
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity.endorsement import endorse_renewal
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.on_disk.provenance import PROVENANCE_FILE, verified
from lorica_security.on_disk.reading import read_log
from lorica_security.pki.authority import Authority
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from silo_wire.canonical import Digest
from silo_wire.codecs import updates_codec
from silo_wire.codecs.renewal import renewal_from_wire
from silo_wire.messages import Prepare, Train
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2, operator_pb2, operator_pb2_grpc
from tests.support.certificates import forged
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
from tests.support.every_call import FEDERATION_CALLS, OPERATOR_CALLS, call, request_for
from tests.support.lifecycle import kept_agent, silo_at

NAMES = {Role.OPERATOR: "olga", Role.VIEWER: "victor"}


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(federation_template.copy(tmp_path / "coordinator"), offer="default") as coordinator:
        yield coordinator


@pytest.fixture
def locked(at: RunningCoordinator) -> Iterator[None]:
    """As by `coordinator serve`: commands on its host go over the wire then."""
    with ProcessLock(at.coordinator.folder.lock, "coordinator"):
        yield


@pytest.fixture
async def hospital(at: RunningCoordinator, federation_template: FederationTemplate) -> AsyncIterator[Silo]:
    async with Silo(at, federation_template.silos[HOSPITAL]) as silo:
        yield silo


async def training(at: RunningCoordinator, *silos: Silo) -> None:
    plan = at.coordinator.shelf.compile("default").plan.digest
    for silo in silos:
        await silo.join(plan)
    for silo in silos:
        await silo.order(Train)


@pytest.fixture
async def order(
    at: RunningCoordinator, hospital: Silo, federation_template: FederationTemplate
) -> AsyncIterator[Train]:
    """Hospital's, in a round with the bank."""
    async with Silo(at, federation_template.silos[BANK]) as bank:
        await training(at, hospital, bank)
        yield await hospital.order(Train)


async def revoke(at: RunningCoordinator, role: Role, name: str) -> str:
    async with at.operator() as operator:
        reply = await operator.Revoke(operator_pb2.RevokeRequest(role=role.value, name=name), timeout=PATIENCE_S)
        return reply.detail


async def end_of(silo: Silo) -> LoricaError:
    """What its stream of orders ends with."""
    assert silo._reader is not None
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.shield(silo._reader)
    silo._reader = None
    return error_of(caught.value)


# --- revocation ---------------------------------------------------------------------------------------------------


async def test_revoked_silo_is_cut_off_in_the_middle_of_its_stream_and_kept_out(
    at: RunningCoordinator, hospital: Silo, federation_template: FederationTemplate
) -> None:
    async with Silo(at, federation_template.silos[BANK]) as bank:
        await training(at, hospital, bank)
        assert "revoked" in await revoke(at, Role.SILO, HOSPITAL)

        told = await end_of(hospital)
        assert isinstance(told, AuthorisationError)
        assert "revoked" in str(told)
        for method in FEDERATION_CALLS:
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "was revoked"):
                await call(hospital.channel, method, request_for(method, hospital.key()))

        state = at.service._loop.state
        assert isinstance(state, Collecting)
        assert HOSPITAL not in state.course.population
        bundle = at.coordinator.shelf.compile("default")
        order = await bank.order(Train)
        await bank.upload(bank.update(order, bundle.layout))
        await until(lambda: not isinstance(at.service._loop.state, Collecting | Aggregating))
        (row, *_) = at.saved()[1]  # type: ignore[misc]
        assert [(item.silo, item.outcome) for item in row.silos] == [(BANK, "committed"), (HOSPITAL, "refused")]


async def test_revocation_ends_an_upload_under_way_and_drops_what_was_committed(
    at: RunningCoordinator, hospital: Silo, federation_template: FederationTemplate
) -> None:
    async with Silo(at, federation_template.silos[BANK]) as bank:
        await training(at, hospital, bank)
        bundle = at.coordinator.shelf.compile("default")
        update = hospital.update(await hospital.order(Train), bundle.layout)
        begun = asyncio.Event()

        async def stalled() -> AsyncIterator[federation_pb2.UpdatePiece]:
            yield header_piece(updates_codec.update_header_to_wire(update.header, HOSPITAL))
            yield chunk_pieces(update.chunks)[0]
            begun.set()
            await asyncio.Event().wait()

        upload = hospital.stub.UploadUpdate(stalled(), timeout=PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            await begun.wait()
        await revoke(at, Role.SILO, HOSPITAL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await upload
        assert isinstance(error_of(caught.value), AuthorisationError)


@pytest.fixture
def cut_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once this was called, the next call that sends something is cut when gRPC has begun to send it."""
    send = _OpenCall._send
    error = OutsideValidity("cut in the middle")  # of a class that the status code alone does not tell

    async def cutting(call: _OpenCall, what: Awaitable[None]) -> None:
        async def begun() -> None:
            asyncio.get_running_loop().call_soon(call.cut, error)
            await what

        monkeypatch.setattr(_OpenCall, "_send", send)
        await send(call, begun())

    return lambda: monkeypatch.setattr(_OpenCall, "_send", cutting)


async def test_a_call_that_is_cut_while_its_headers_go_out_is_told_why(
    at: RunningCoordinator, hospital: Silo, order: Train, cut_in_the_middle: Callable[[], None]
) -> None:
    update = hospital.update(order, at.coordinator.shelf.compile("default").layout)
    cut_in_the_middle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hospital.upload(update)
    assert isinstance(error_of(caught.value), OutsideValidity)


async def test_a_download_that_is_cut_while_a_chunk_goes_out_is_told_why(
    at: RunningCoordinator, hospital: Silo, order: Train, cut_in_the_middle: Callable[[], None]
) -> None:
    wanted = model_request(hospital, at, order)
    cut_in_the_middle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [piece async for piece in hospital.stub.FetchModel(wanted, timeout=PATIENCE_S)]
    assert isinstance(error_of(caught.value), OutsideValidity)


def model_request(silo: Silo, at: RunningCoordinator, order: Train) -> federation_pb2.FetchModelRequest:
    plan = at.coordinator.shelf.compile("default").plan.digest
    return federation_pb2.FetchModelRequest(key=silo.key(plan), model_digest=bytes.fromhex(order.model))


@pytest.fixture
def waiting_for_their_peer(monkeypatch: pytest.MonkeyPatch) -> set[Place]:
    """Of transfers whose peer took too long for one chunk to keep a place meanwhile."""
    waiting: set[Place] = set()
    give_up, keep = Place.give_up, Place.keep

    def gives_up(place: Place) -> None:
        waiting.add(place)
        give_up(place)

    async def keeps(place: Place) -> None:
        waiting.discard(place)
        await keep(place)

    monkeypatch.setattr(Place, "give_up", gives_up)
    monkeypatch.setattr(Place, "keep", keeps)
    return waiting


class LongModel:
    """One chunk of a model, again and again: more than gRPC takes for a caller that does not read."""

    CHUNKS = 128

    def __init__(self, model: ModelSource, chunk: bytes) -> None:
        manifest = model.header.manifest
        self.header = replace(
            model.header,
            manifest=replace(
                manifest, total_bytes=self.CHUNKS * manifest.chunk_bytes, chunk_digests=(bytes(32),) * self.CHUNKS
            ),
        )
        self._chunk = chunk
        self.asked = 0

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def piece(self, index: int) -> bytes:
        self.asked += 1
        return self._chunk


@pytest.fixture
async def never_read(
    at: RunningCoordinator,
    hospital: Silo,
    order: Train,
    monkeypatch: pytest.MonkeyPatch,
    waiting_for_their_peer: set[Place],
) -> list[AsyncIterator[federation_pb2.ModelPiece]]:
    """As many downloads as hospital may have beside its stream of orders; each waits for it to read on."""
    wanted = model_request(hospital, at, order)
    model = await at.service.model(at.coordinator.shelf.compile("default").plan.digest, order.model)
    long = LongModel(model, await model.piece(0))

    async def is_long(plan: Digest, digest: Digest) -> LongModel:
        return long

    monkeypatch.setattr(at.service, "model", is_long)
    held = OF_ONE_CALLER.calls - 1
    downloads = [aiter(hospital.stub.FetchModel(wanted, timeout=PATIENCE_S)) for _ in range(held)]
    for download in downloads:
        assert await anext(download)
    await until(lambda: len(waiting_for_their_peer) == held)
    assert long.asked < LongModel.CHUNKS * held
    return downloads


async def test_downloads_that_stolen_keys_never_read_take_no_place_from_the_silo_that_is_enrolled_anew(
    at: RunningCoordinator, never_read: list[AsyncIterator[federation_pb2.ModelPiece]]
) -> None:
    """They are told once they read, and not before they hold nothing any more."""
    fresh = await at.enrolled(HOSPITAL)
    async with Silo(at, fresh, instance=b"another folder!!") as back:
        await back.join(at.coordinator.shelf.compile("default").plan.digest)
    for download in never_read:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [piece async for piece in download]
        assert isinstance(error_of(caught.value), AuthorisationError)


async def test_one_that_is_cut_and_hangs_up_leaves_no_call_and_no_traceback(
    at: RunningCoordinator,
    hospital: Silo,
    never_read: list[AsyncIterator[federation_pb2.ModelPiece]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await revoke(at, Role.SILO, HOSPITAL)
    await hospital.channel.close()
    await until(lambda: not any("FetchModel" in task.get_name() for task in asyncio.all_tasks()))
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "asyncio"] == []


async def test_revoked_silo_comes_back_by_a_new_invitation_and_its_old_certificate_does_not(
    at: RunningCoordinator, hospital: Silo
) -> None:
    await revoke(at, Role.SILO, HOSPITAL)
    fresh = await at.enrolled(HOSPITAL)
    async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "revoked or replaced"):
        await call(hospital.channel, FEDERATION_CALLS[0], hospital.attend_request())
    async with Silo(at, fresh) as back:
        await back.join(at.coordinator.shelf.compile("default").plan.digest)


async def test_keys_of_a_silo_that_was_enrolled_anew_are_worthless(at: RunningCoordinator, hospital: Silo) -> None:
    """As after a laptop was stolen and the silo set up again: the old certificate is still within its dates."""
    await at.enrolled(HOSPITAL)
    async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "revoked or replaced"):
        await call(hospital.channel, FEDERATION_CALLS[0], hospital.attend_request())


async def test_enrolling_anew_cuts_open_calls_of_the_old_keys_and_frees_the_seat(
    at: RunningCoordinator, hospital: Silo
) -> None:
    """Whoever copied the folder holds the stream of orders, and would keep the silo itself out."""
    hospital.attend()
    await hospital.order(Prepare)
    fresh = await at.enrolled(HOSPITAL)
    assert isinstance(await end_of(hospital), AuthorisationError)
    async with Silo(at, fresh, instance=b"another folder!!") as back:
        back.attend()
        await back.order(Prepare)


async def test_what_stolen_keys_committed_is_not_summed_once_the_silo_is_enrolled_anew(
    at: RunningCoordinator, hospital: Silo, federation_template: FederationTemplate
) -> None:
    async with Silo(at, federation_template.silos[BANK]) as bank:
        await training(at, hospital, bank)
        bundle = at.coordinator.shelf.compile("default")
        await hospital.upload(hospital.update(await hospital.order(Train), bundle.layout))
        await at.enrolled(HOSPITAL)
        state = at.service._loop.state
        assert isinstance(state, Collecting)
        assert state.updates == ()
        assert [(one.silo, one.detail) for one in state.declined] == [(HOSPITAL, "enrolled anew with other keys")]


async def test_renewal_that_began_before_an_enrolment_issues_nothing_after_it(
    at: RunningCoordinator, hospital: Silo
) -> None:
    who = hospital.credentials
    request = certificate_request(new_tls_key(), who.identity)
    before = public_key_bytes(who.identity_key.public_key())
    certificate = at.coordinator.keys.recertify(
        HOSPITAL,
        csr_der=request,
        identity_public_key=before,
        identity_endorsement=endorse_renewal(who.identity_key, request=request, identity=who.identity),
        now=at.clock(),
    )
    await at.enrolled(HOSPITAL)
    with closing(at.coordinator.open_store()) as store, pytest.raises(StateError):
        store.renew(HOSPITAL, certificate, identity_public_key=before, trust="", at=at.clock())


async def test_revocation_voids_an_open_invitation(at: RunningCoordinator) -> None:
    await at.invited("clinic-c")
    await revoke(at, Role.SILO, "clinic-c")
    assert at.service.enrolment.invited() == ()


async def test_revocation_outlives_a_restart(federation_template: FederationTemplate, tmp_path: Path) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder, offer="default") as before:
        await revoke(before, Role.SILO, HOSPITAL)
    async with running(folder, offer="default") as at, Silo(at, federation_template.silos[HOSPITAL]) as hospital:
        async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "was revoked"):
            await call(hospital.channel, FEDERATION_CALLS[0], hospital.attend_request())
        async with at.operator() as operator:
            standing = await operator.GetStatus(operator_pb2.GetStatusRequest())
        assert {item.silo: item.state for item in standing.silos}[HOSPITAL] == "revoked"


async def test_nobody_is_revoked_by_a_name_that_nobody_has(at: RunningCoordinator) -> None:
    async with refused(at, StateError, grpc.StatusCode.FAILED_PRECONDITION, "no certificate that could be revoked"):
        await revoke(at, Role.SILO, "dentist-d")


# --- certificates that the authority signed, and that are not in the register -----------------------------------------


async def test_certificate_made_with_the_stolen_key_of_the_authority(at: RunningCoordinator, hospital: Silo) -> None:
    authority = at.coordinator.keys.authority
    for role, name, method in (
        (Role.OPERATOR, "operator", OPERATOR_CALLS[0]),
        (Role.SILO, HOSPITAL, FEDERATION_CALLS[0]),
    ):
        key_pem, certificate_pem = forged(authority, Identity(FEDERATION, role, name))
        async with (
            at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel,
            refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "not in the coordinator's register"),
        ):
            await call(channel, method, request_for(method, hospital.key()))


async def test_certificate_with_the_serial_of_another_one(at: RunningCoordinator, hospital: Silo) -> None:
    serial = hospital.credentials.certificate.serial_number
    pair = forged(at.coordinator.keys.authority, Identity(FEDERATION, Role.OPERATOR, "operator"), serial=serial)
    async with (
        at.channel(key_pem=pair[0], certificate_pem=pair[1]) as channel,
        refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "not in the coordinator's register"),
    ):
        await call(channel, OPERATOR_CALLS[0], operator_pb2.GetStatusRequest())


@pytest.mark.parametrize("whose", ["the silo's", "the operator's"])
async def test_forged_certificate_with_a_registered_serial_is_refused(
    at: RunningCoordinator, hospital: Silo, whose: str
) -> None:
    """Who has stolen an authority's key chooses the serial, and serials stand in logs: the whole certificate is
    compared."""
    identity, method, request = Identity(FEDERATION, Role.OPERATOR, "operator"), OPERATOR_CALLS[0], None
    serial = at.coordinator.keys.operator_pair(datetime.now(UTC)).certificate.serial_number
    if whose == "the silo's":
        identity, method = Identity(FEDERATION, Role.SILO, HOSPITAL), FEDERATION_CALLS[0]
        request, serial = request_for(method, hospital.key()), hospital.credentials.certificate.serial_number
    pair = forged(at.coordinator.keys.authority, identity, serial=serial)
    async with (
        at.channel(key_pem=pair[0], certificate_pem=pair[1]) as channel,
        refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "not in the coordinator's register"),
    ):
        await call(channel, method, request or operator_pb2.GetStatusRequest())


async def test_stream_outlives_no_certificate(at: RunningCoordinator, federation_template: FederationTemplate) -> None:
    """A connection that was let in would stay for ever: TLS looks at the dates once."""
    now = datetime.now(UTC)
    pair = forged(at.coordinator.keys.authority, Identity(FEDERATION, Role.SILO, BANK), end=now + timedelta(seconds=6))
    await at.service.register.add(register_entry(x509.load_pem_x509_certificate(pair[1]), now))
    async with Silo(at, federation_template.silos[BANK]) as bank:
        await bank.channel.close()
        bank.channel = at.channel(key_pem=pair[0], certificate_pem=pair[1])
        bank.stub = codec_stub(bank.channel)
        bank.attend()
        told = await end_of(bank)
    assert isinstance(told, AuthenticationError)
    assert "expired" in str(told)


def codec_stub(channel: grpc.aio.Channel) -> Any:
    from silo_wire.v1 import federation_pb2_grpc

    return federation_pb2_grpc.FederationStub(channel)


# --- operators and viewers from other hosts -----------------------------------------------------------------------


async def granted(at: RunningCoordinator, folder: Path, role: Role, *, valid_s: int = 0) -> AccessFolder:
    """Through the commands' own parts: asked for there, granted here, accepted there."""
    access, identity = AccessFolder(folder), Identity(FEDERATION, role, NAMES[role])
    der = x509.load_pem_x509_csr(access.ask(identity)).public_bytes(Encoding.DER)
    async with at.operator() as operator:
        reply = await operator.GrantAccess(
            operator_pb2.GrantAccessRequest(role=role.value, name=identity.name, csr_der=der, valid_seconds=valid_s)
        )
    text = granted_text(identity, reply)
    assert access.accept(text, now=datetime.now(UTC)) == identity
    return access


def call_from(access: AccessFolder, request: Any, method: str) -> Any:
    return access.load(now=datetime.now(UTC)).call(lambda stub: getattr(stub, method)(request))


async def test_viewer_from_another_host_looks_and_changes_nothing(at: RunningCoordinator, tmp_path: Path) -> None:
    viewer = await granted(at, tmp_path / "access", Role.VIEWER)
    status = await asyncio.to_thread(call_from, viewer, operator_pb2.GetStatusRequest(), "GetStatus")
    assert status.federation == FEDERATION
    before = at.saved()
    for request, method in (
        (operator_pb2.InviteRequest(silo="clinic-c"), "Invite"),
        (operator_pb2.StopPlanRequest(), "StopPlan"),
        (operator_pb2.RevokeRequest(role="silo", name=HOSPITAL), "Revoke"),
    ):
        with pytest.raises(AuthorisationError, match="role viewer"):
            await asyncio.to_thread(call_from, viewer, request, method)
    assert at.saved() == before


async def test_operator_from_another_host_invites_pauses_and_is_revoked(at: RunningCoordinator, tmp_path: Path) -> None:
    operator = await granted(at, tmp_path / "access", Role.OPERATOR)
    reply = await asyncio.to_thread(call_from, operator, operator_pb2.InviteRequest(silo="clinic-c"), "Invite")
    assert reply.token.startswith("lorica1-")
    assert at.service.enrolment.invited() == (SiloName("clinic-c"),)
    paused = await asyncio.to_thread(call_from, operator, operator_pb2.PausePlanRequest(), "PausePlan")
    assert "paused by the operator" in paused.detail
    await asyncio.to_thread(call_from, operator, operator_pb2.ResumePlanRequest(), "ResumePlan")
    async with at.operator() as local:
        listed = await local.ListAccess(operator_pb2.ListAccessRequest())
    assert [(item.role, item.name, item.revoked_unix_s) for item in listed.certificates] == [
        ("operator", "operator", 0.0),
        ("operator", "olga", 0.0),
    ]
    await revoke(at, Role.OPERATOR, "olga")
    with pytest.raises(AuthorisationError, match="revoked"):
        await asyncio.to_thread(call_from, operator, operator_pb2.GetStatusRequest(), "GetStatus")


async def test_an_operator_elsewhere_changes_no_authority(at: RunningCoordinator, tmp_path: Path) -> None:
    """A laptop that was stolen: three calls would put every silo out, and erase the authority's key."""
    operator = await granted(at, tmp_path / "access", Role.OPERATOR)
    before = at.coordinator.keys.authorities.standings()
    for step in ("rotate", "activate", "retire"):
        request = operator_pb2.ChangeAuthorityRequest(step=step, force=True)
        with pytest.raises(AuthorisationError, match="the coordinator's own host"):
            await asyncio.to_thread(call_from, operator, request, "ChangeAuthority")
    assert at.coordinator.keys.authorities.standings() == before
    listed = await asyncio.to_thread(call_from, operator, operator_pb2.ListAuthoritiesRequest(), "ListAuthorities")
    assert [row.name for row in listed.authorities] == ["ca"]


async def test_access_is_granted_for_no_longer_than_the_settings_say(at: RunningCoordinator, tmp_path: Path) -> None:
    for days in (30.1, 36_525, 1e12):
        with pytest.raises(grpc.aio.AioRpcError, match="access_lifetime_days"):
            await granted(at, tmp_path / f"{days}", Role.OPERATOR, valid_s=int(days * 86_400))
    await granted(at, tmp_path / "access", Role.OPERATOR, valid_s=30 * 86_400)


async def test_retiring_an_authority_cuts_calls_of_its_certificates(
    at: RunningCoordinator, hospital: Silo, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Who got in with a certificate of the stolen authority does not stay on the connection that is open; others do."""
    bank_folder = silo_at(tmp_path / "bank", federation_template.silos[BANK], at.address)
    async with kept_agent(bank_folder) as bank:
        hospital.attend()
        await hospital.order(Prepare)
        async with at.operator() as operator:
            for step in ("rotate", "activate"):
                await operator.ChangeAuthority(operator_pb2.ChangeAuthorityRequest(step=step, force=True))
        await bank.until(lambda: len(bank.stored.trust.authorities) == 2)
        await bank.certificate.renew()
        standing = len(bank.orders)
        await bank.until(lambda: len(bank.orders) > standing)
        async with at.operator() as operator:
            await operator.ChangeAuthority(operator_pb2.ChangeAuthorityRequest(step="retire", force=True))
        told = await end_of(hospital)
        assert isinstance(told, Unreachable)
        assert "authority of this call's certificate was retired" in str(told)
        # The same connection stays open: nothing goes over it.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(hospital.channel, FEDERATION_CALLS[0], hospital.attend_request())
        assert isinstance(error_of(caught.value), AuthenticationError | Unreachable)
        await bank.until(lambda: len(bank.stored.trust.authorities) == 1)
        assert bank.problems == []


async def renewed(at: RunningCoordinator, access: AccessFolder) -> None:
    """As `coordinator access renew` does it, its first call with the new certificate included."""
    message = operator_pb2.RenewAccessRequest(csr_der=access.begin_renewal())
    reply = await asyncio.to_thread(call_from, access, message, "RenewAccess")
    access.renew(renewal_from_wire(reply), now=datetime.now(UTC))
    await asyncio.to_thread(call_from, access, operator_pb2.GetStatusRequest(), "GetStatus")


async def test_rotation_waits_for_operators_elsewhere_who_would_be_left_behind(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Every silo knows the successor, a laptop and a screen on the wall do not; whoever was revoked is not waited
    for."""
    olga = await granted(at, tmp_path / "olga", Role.OPERATOR)
    victor = await granted(at, tmp_path / "victor", Role.VIEWER)

    def stages() -> dict[str, str]:
        return {one.name: one.stage for one in at.coordinator.keys.authorities.standings()}

    async def change(step: str) -> None:
        async with at.operator() as operator:
            await operator.ChangeAuthority(operator_pb2.ChangeAuthorityRequest(step=step))

    async with (
        kept_agent(silo_at(tmp_path / "a", federation_template.silos[HOSPITAL], at.address)) as hospital,
        kept_agent(silo_at(tmp_path / "b", federation_template.silos[BANK], at.address)) as bank,
    ):
        await change("rotate")
        for agent in (hospital, bank):
            await agent.until(lambda agent=agent: len(agent.stored.trust.authorities) == 2)  # type: ignore[misc]
            seats = len(agent.orders)
            await agent.certificate.renew()
            await agent.until(lambda agent=agent, seats=seats: len(agent.orders) > seats)  # type: ignore[misc]
        await at.service.authorities.advance()
        assert stages() == {"ca": "issuing", "ca-2": "successor"}
        with pytest.raises(grpc.aio.AioRpcError, match="not known to operator olga, viewer victor yet"):
            await change("activate")
        await renewed(at, olga)
        with pytest.raises(grpc.aio.AioRpcError, match="not known to viewer victor yet"):
            await change("activate")
        await renewed(at, victor)
        await at.service.authorities.advance()
        assert stages() == {"ca-2": "issuing", "ca": "trusted"}
        for agent in (hospital, bank):
            seats = len(agent.orders)
            await agent.certificate.renew()
            await agent.until(lambda agent=agent, seats=seats: len(agent.orders) > seats)  # type: ignore[misc]
        await renewed(at, olga)
        with pytest.raises(grpc.aio.AioRpcError, match="needed by the certificates of viewer victor:"):
            await change("retire")
        await revoke(at, Role.VIEWER, "victor")
        await at.service.authorities.advance()
        assert stages() == {"ca-2": "issuing"}
        await asyncio.to_thread(call_from, olga, operator_pb2.GetStatusRequest(), "GetStatus")


async def test_renewed_access_ends_when_it_did_before_and_stands_in_register_and_log(
    at: RunningCoordinator, tmp_path: Path
) -> None:
    """Nothing but the key itself asks for it: a stolen one gains no time."""
    viewer = await granted(at, tmp_path / "access", Role.VIEWER, valid_s=7200)
    before = viewer.load(now=datetime.now(UTC)).pair
    await renewed(at, viewer)
    after = viewer.load(now=datetime.now(UTC)).pair
    assert after.expires == before.expires
    assert after.certificate.public_key() != before.certificate.public_key()
    assert not viewer.next_key.exists()
    registered = [item for item in at.service.register.certificates() if item.identity.name == "victor"]
    assert [item.expires_unix_s for item in registered] == [before.expires.timestamp()] * 2
    commands = read_log(at.coordinator.folder.audit).of(Event.OPERATOR_COMMAND)
    assert [entry.who for entry in commands if entry.text("command") == "RenewAccess"] == [
        Identity(FEDERATION, Role.VIEWER, "victor").uri
    ]
    await revoke(at, Role.VIEWER, "victor")
    with pytest.raises(AuthorisationError, match="revoked"):
        await renewed(at, viewer)
    await asyncio.to_thread(viewer.load, now=datetime.now(UTC))  # what is here still fits


async def test_access_is_renewed_for_nobody_else_and_nothing_higher(at: RunningCoordinator, tmp_path: Path) -> None:
    viewer = await granted(at, tmp_path / "access", Role.VIEWER)
    for other in (
        Identity(FEDERATION, Role.OPERATOR, "victor"),
        Identity(FEDERATION, Role.VIEWER, "anna"),
        Identity(FEDERATION, Role.SILO, HOSPITAL),
    ):
        message = operator_pb2.RenewAccessRequest(csr_der=certificate_request(new_tls_key(), other))
        with pytest.raises(AuthorisationError, match="is for spiffe://"):
            await asyncio.to_thread(call_from, viewer, message, "RenewAccess")
    async with (
        at.operator() as host,
        refused(at, ConfigurationError, grpc.StatusCode.INVALID_ARGUMENT, "renewed by itself"),
    ):
        await host.RenewAccess(operator_pb2.RenewAccessRequest())


async def test_renewed_access_with_an_authority_that_the_coordinator_did_not_sign_for(
    at: RunningCoordinator, tmp_path: Path
) -> None:
    """Whoever stands in the middle of TLS, with the stolen key of an authority, slips in one of its own."""
    viewer = await granted(at, tmp_path / "access", Role.VIEWER)
    before = viewer.granted.read_bytes()
    message = operator_pb2.RenewAccessRequest(csr_der=viewer.begin_renewal())
    honest = renewal_from_wire(await asyncio.to_thread(call_from, viewer, message, "RenewAccess"))
    evil = Authority.create(FEDERATION, now=datetime.now(UTC)).certificate
    for lie in (
        replace(honest, trust=TrustBundle((*honest.trust.authorities, evil))),
        replace(honest, since=honest.since + 1),
        replace(honest, signature=bytes(64)),
    ):
        with pytest.raises(IntegrityError):
            viewer.renew(lie, now=datetime.now(UTC))
    assert viewer.granted.read_bytes() == before
    await asyncio.to_thread(call_from, viewer, operator_pb2.GetStatusRequest(), "GetStatus")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("write", ["write_private", "write_key"])
async def test_a_kill_as_access_is_renewed_leaves_access_that_works(
    at: RunningCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    viewer = await granted(at, tmp_path / "access", Role.VIEWER)
    message = operator_pb2.RenewAccessRequest(csr_der=viewer.begin_renewal())
    answer = renewal_from_wire(await asyncio.to_thread(call_from, viewer, message, "RenewAccess"))

    def killed(*arguments: object) -> None:
        raise Killed

    module = files if write == "write_private" else key_file
    with monkeypatch.context() as patch:
        patch.setattr(module, write, killed)
        with pytest.raises(Killed):
            viewer.renew(answer, now=datetime.now(UTC))
    await asyncio.to_thread(call_from, viewer, operator_pb2.GetStatusRequest(), "GetStatus")
    await renewed(at, viewer)


async def test_request_for_a_higher_role_than_the_one_that_is_granted(at: RunningCoordinator, tmp_path: Path) -> None:
    pem = AccessFolder(tmp_path / "access").ask(Identity(FEDERATION, Role.OPERATOR, "victor"))
    der = x509.load_pem_x509_csr(pem).public_bytes(Encoding.DER)
    async with at.operator() as operator:
        request = operator_pb2.GrantAccessRequest(role="viewer", name="victor", csr_der=der)
        async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "/operator/victor"):
            await operator.GrantAccess(request)
        for role in ("silo", "coordinator"):
            async with refused(
                at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, f"role {role} is not granted"
            ):
                await operator.GrantAccess(operator_pb2.GrantAccessRequest(role=role, name="victor", csr_der=der))


@pytest.mark.parametrize("valid_s", [3650 * 86_400 + 1, 1 << 40, (1 << 64) - 1])
async def test_access_for_longer_than_any(at: RunningCoordinator, tmp_path: Path, valid_s: int) -> None:
    pem = AccessFolder(tmp_path / "access").ask(Identity(FEDERATION, Role.VIEWER, "victor"))
    der = x509.load_pem_x509_csr(pem).public_bytes(Encoding.DER)
    request = operator_pb2.GrantAccessRequest(role="viewer", name="victor", csr_der=der, valid_seconds=valid_s)
    async with at.operator() as operator:
        async with refused(
            at,
            ConfigurationError,
            grpc.StatusCode.INVALID_ARGUMENT,
            "access_lifetime_days of federation.toml is 30: grant fewer",
        ):
            await operator.GrantAccess(request)
        assert not [item for item in at.service.register.certificates() if item.identity.name == "victor"]


async def test_granted_file_of_an_impostor_coordinator_for_another_key(at: RunningCoordinator, tmp_path: Path) -> None:
    access, identity = AccessFolder(tmp_path / "access"), Identity(FEDERATION, Role.VIEWER, "victor")
    access.ask(identity)
    impostor = Authority.create(FEDERATION, now=datetime.now(UTC))
    _, certificate_pem = forged(impostor, identity)
    reply = operator_pb2.GrantAccessReply(
        certificate_pem=certificate_pem,
        trust_bundle_pem=impostor.certificate_pem(),
        address="127.0.0.1:1",
        coordinator_identity_key=bytes(32),
    )
    text = granted_text(identity, reply)
    with pytest.raises(ConfigurationError, match="another key"):
        access.accept(text, now=datetime.now(UTC))
    assert not access.granted.exists()


async def test_the_hosts_own_operator_is_neither_revoked_nor_granted_to_somebody_else(at: RunningCoordinator) -> None:
    """Its owner has the coordinator's keys: a revocation would only lock the operator out."""
    refusal = (ConfigurationError, grpc.StatusCode.INVALID_ARGUMENT, "own host")
    async with refused(at, *refusal):
        await revoke(at, Role.OPERATOR, "operator")
    async with at.operator() as operator, refused(at, *refusal):
        await operator.GrantAccess(operator_pb2.GrantAccessRequest(role="operator", name="operator"))


async def test_operators_commands_from_another_host(
    at: RunningCoordinator, locked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are typed: asked for there, granted on the coordinator's host, accepted there; the model comes as a
    folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    host, laptop = str(at.coordinator.folder.root), str(tmp_path / "laptop")

    async def typed(*words: str) -> str:
        with capture_logs():  # the coordinator's, which is in this process, would stand between
            done = await asyncio.to_thread(CliRunner().invoke, app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    (tmp_path / "csr").write_text(
        await typed("access", "request", FEDERATION, "olga", "--role", "operator", "--dir", laptop)
    )
    with pytest.raises(ConfigurationError, match="you grant viewer olga"):
        await typed("access", "grant", "olga", str(tmp_path / "csr"), "--dir", host)
    granted = await typed(
        "access", "grant", "olga", str(tmp_path / "csr"), "--role", "operator", "--days", "2", "--dir", host
    )
    (tmp_path / "granted").write_text(granted)
    await typed("access", "accept", str(tmp_path / "granted"), "--dir", laptop)

    assert json.loads(await typed("status", "--json"))["running"]
    assert "paused by the operator" in await typed("plan", "pause")
    await typed("plan", "resume")
    assert "olga" in await typed("access", "list", "--json")
    assert "authorities that are trusted: 1" in await typed("access", "renew", "--dir", laptop)
    assert len(json.loads(await typed("access", "list", "--json"))) == 3
    await typed("export", str(tmp_path / "model"))
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= names
    await typed("export", str(tmp_path / "beside"), "--dir", host)
    key = at.coordinator.keys.identity.public_key()
    assert verified(tmp_path / "model", key).files == verified(tmp_path / "beside", key).files
    for name in names - {PROVENANCE_FILE}:
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()
    assert not any((at.coordinator.settings.state_folder / "exports").iterdir())
    with pytest.raises(ConfigurationError, match="on the coordinator's own"):
        await typed("plan", "list")
    assert "revoked" in await typed("revoke", BANK)


# --- exports to other hosts ---------------------------------------------------------------------------------------


async def exported(operator: "operator_pb2_grpc.OperatorAsyncStub") -> int:
    """How many pieces came."""
    request = operator_pb2.ExportModelRequest()
    return len([piece async for piece in operator.ExportModel(request, timeout=PATIENCE_S)])


async def test_an_export_that_is_cut_leaves_nothing(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that was killed; and the disk is not filled by many at once."""
    folder = federation_template.copy(tmp_path / "coordinator")
    scratch = Coordinator.load(folder).settings.state_folder / "exports"
    (scratch / ".1f-tmp").mkdir(parents=True)  # a killed coordinator's
    begun, going_on, ended = threading.Event(), threading.Event(), threading.Event()
    real = export.export_model

    def held_up(*arguments: Any, **named: Any) -> None:
        begun.set()
        going_on.wait(PATIENCE_S)
        real(*arguments, **named)
        ended.set()

    async with running(folder, offer="default") as at, at.operator() as operator:
        assert not scratch.exists()
        monkeypatch.setattr(export, "export_model", held_up)
        cut = operator.ExportModel(operator_pb2.ExportModelRequest())
        reading = asyncio.create_task(cut.read())
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        async with refused(at, Conflict, grpc.StatusCode.ALREADY_EXISTS, "another model is being exported"):
            await exported(operator)
        cut.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await operator.GetStatus(
            operator_pb2.GetStatusRequest()
        )  # on the same connection: the coordinator knows by now
        going_on.set()
        await asyncio.to_thread(ended.wait, PATIENCE_S)
        await until(lambda: not any(scratch.iterdir()))
        assert await exported(operator) > 3
        assert not any(scratch.iterdir())
