"""One authority follows another while silos stay connected, an institution's CA certifies one, and a kill between any
two steps."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys import authorities as authorities_module
from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import Evaluating
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.members.authority_succession import AuthorityRow, due_step
from lorica_security.errors import AuthenticationError, ConfigurationError, StateError
from lorica_security.host import files
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.endorsement import endorse_renewal
from lorica_security.pki.authority import Authority
from lorica_security.pki.authority_succession import certificate_digest
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.pins import spki_pin
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle, directly_issued
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_tls
from silo_agent.edges.wire import enrolment_client
from silo_agent.edges.wire.enrolment_client import enrol
from silo_wire.codecs.renewal import renewal_request
from silo_wire.messages import Evaluate, Prepare, Train
from silo_wire.v1 import federation_pb2, operator_pb2
from tests.support.command_line import run_command
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    FederationTemplate,
    RunningCoordinator,
    Silo,
    accepts,
    running,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.coordinator import until as wait_until
from tests.support.lifecycle import kept_agent, silo_at

PASSPHRASE = "correct horse battery staple"


async def change(at: RunningCoordinator, step: str, *, force: bool = False, **more: bytes) -> dict[str, str]:
    """The stage of each authority after an operator's step."""
    async with at.operator() as operator:
        reply = await operator.ChangeAuthority(operator_pb2.ChangeAuthorityRequest(step=step, force=force, **more))
    return {row.name: row.stage for row in reply.authorities}


def stages(at: RunningCoordinator) -> dict[str, str]:
    return {one.name: one.stage for one in at.coordinator.keys.authorities.standings()}


async def until(at: RunningCoordinator, expected: dict[str, str]) -> None:
    changed = asyncio.Event()
    at.service.authorities.on_change.append(changed.set)
    async with asyncio.timeout(PATIENCE_S):
        while stages(at) != expected:
            changed.clear()
            await changed.wait()


async def used(at: RunningCoordinator, folder: SiloFolder) -> None:
    """Until a call came with the certificate that this silo holds: before that its renewal does not count."""
    serial, arrived = f"{load_credentials(folder).certificate.serial_number:x}", asyncio.Event()
    at.service.held.on_arrived.append(arrived.set)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            arrived.clear()
            if all(held.sent != serial for held in (await at.service.held.known()).values()):
                return
            await arrived.wait()


async def until_closed(at: RunningCoordinator) -> None:
    """Until nobody listens for tokens."""
    await wait_until(lambda: not accepts(at.enrolment_port))


async def test_two_silos_go_from_one_authority_to_the_next_within_a_round(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """No connection is lost, the round counts both updates, and in the end nothing depends on the authority before."""
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder, offer="default") as at:
        plan = at.coordinator.shelf.bundle(at.coordinator.shelf.compile("default").plan.digest)
        silos = [silo_at(tmp_path / name, federation_template.silos[name], at.address) for name in (HOSPITAL, BANK)]
        old = at.coordinator.keys.authority.certificate
        async with kept_agent(silos[0]) as hospital, kept_agent(silos[1]) as bank:
            for agent in (hospital, bank):
                await agent.order(Prepare)
                await agent.coordinator.declare_readiness(plan.plan.digest, ready=True, reason="")
            orders = [await agent.order(Train) for agent in (hospital, bank)]

            assert await change(at, "rotate") == {"ca": "issuing", "ca-2": "successor"}
            # Both hear of it with their next order, fetch the bundle, and that is when it issues.
            await until(at, {"ca-2": "issuing", "ca": "trusted"})
            new = at.coordinator.keys.authority.certificate
            assert not (folder.keys / "ca.key").exists()
            for agent in (hospital, bank):
                assert agent.stored.trust.authorities == (old, new)
                assert directly_issued(agent.stored.certificate, by=old)
                await agent.certificate.renew()
                assert directly_issued(agent.stored.certificate, by=new)
            await until(at, {"ca-2": "issuing"})
            for agent in (hospital, bank):
                await agent.until(lambda agent=agent: agent.stored.trust.authorities == (new,))  # type: ignore[misc]

            for agent, order in zip((hospital, bank), orders, strict=True):
                by_hand = Silo(at, agent.stored)
                update = by_hand.update(order, plan.update_layout)
                await by_hand.upload(update)
                await by_hand.channel.close()
            await agent.order(Evaluate)
            state = at.service._loop.state
            assert isinstance(state, Evaluating)
            assert [one.silo for one in state.course.included] == [BANK, HOSPITAL]
            assert hospital.problems == bank.problems == []
    # A restart stands where it stood.
    assert {one.name: one.stage for one in Coordinator.load(folder).keys.authorities.standings()} == {"ca-2": "issuing"}
    assert sorted(path.name for path in folder.keys.glob("ca*")) == ["ca-2.key", "ca-2.pem"]


async def test_authority_that_a_silo_does_not_know_does_not_issue_unless_forced(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        with pytest.raises(Exception, match="coordinator ca rotate"):
            await change(at, "activate")
        await change(at, "rotate")
        with pytest.raises(Exception, match="waits to succeed already"):
            await change(at, "rotate")
        with pytest.raises(Exception, match=f"ca-2 is not known to silos {BANK}, {HOSPITAL} yet"):
            await change(at, "activate")
        with pytest.raises(Exception, match="every authority is needed"):
            await change(at, "retire")
        silo = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
        async with kept_agent(silo) as hospital:
            await hospital.until(lambda: hospital.times("certificate-renewed") >= 1)
            await used(at, silo)
            with pytest.raises(Exception, match=f"ca-2 is not known to silos {BANK} yet"):
                await change(at, "activate")
            assert await change(at, "activate", force=True) == {"ca-2": "issuing", "ca": "trusted"}
            with pytest.raises(Exception, match=f"ca is needed by the certificates of silos {BANK}, {HOSPITAL}"):
                await change(at, "retire")
            await hospital.certificate.renew()
            await used(at, silo)
            with pytest.raises(Exception, match=f"ca is needed by the certificates of silos {BANK}:"):
                await change(at, "retire")
            assert await change(at, "retire", force=True) == {"ca-2": "issuing"}
            await hospital.until(lambda: len(hospital.stored.trust.authorities) == 1)
        # bank-b was left behind: its certificate is of an authority that is trusted no longer.
        async with Silo(at, federation_template.silos[BANK]) as bank:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await bank.stub.DeclareTrained(None)


async def lost_answer(at: RunningCoordinator, silo: SiloCredentials) -> None:
    """The coordinator has renewed its certificate, and nobody ever reads the answer."""
    request = certificate_request(new_tls_key(), silo.identity)
    endorsement = endorse_renewal(silo.identity_key, request=request, identity=silo.identity)
    message = renewal_request(federation=FEDERATION, silo=silo.silo, csr_der=request, endorsement=endorsement)
    async with Silo(at, silo) as by_hand:
        await by_hand.stub.RenewCertificate(message)


async def test_authorities_follow_each_other_also_where_every_silo_was_revoked(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """That no silo is let in is no sign of a clock that is wrong then: the next silo is to begin with the successor."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        await change(at, "rotate")
        for silo in (HOSPITAL, BANK):
            await at.service.revoke(Role.SILO, silo)
        await at.service.authorities.advance()
        assert stages(at)["ca-2"] == "issuing"


async def test_silo_whose_renewal_answer_was_lost_still_connects_after_a_rotation(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Before the successor issues, and again before the authority before it is retired: both wait for what the silo
    uses."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        folders = [silo_at(tmp_path / name, federation_template.silos[name], at.address) for name in (HOSPITAL, BANK)]
        async with kept_agent(folders[1]) as bank:
            await change(at, "rotate")
            await bank.until(lambda: bank.times("certificate-renewed") >= 1)
            await used(at, folders[1])
            await lost_answer(at, federation_template.silos[HOSPITAL])
            await at.service.authorities.advance()
            assert stages(at) == {"ca": "issuing", "ca-2": "successor"}
            with pytest.raises(Exception, match=f"known to silos {HOSPITAL} yet"):
                await change(at, "activate")
            async with kept_agent(folders[0]) as hospital:  # knows but the authority before
                await until(at, {"ca-2": "issuing", "ca": "trusted"})
                assert hospital.problems == []
            await bank.certificate.renew()
            await used(at, folders[1])
            await lost_answer(at, load_credentials(folders[0]))
            await at.service.authorities.advance()
            assert stages(at) == {"ca-2": "issuing", "ca": "trusted"}
            async with kept_agent(folders[0]) as hospital:
                await hospital.certificate.renew()
                await until(at, {"ca-2": "issuing"})
                assert hospital.problems == bank.problems == []


async def test_what_was_used_as_the_coordinator_ended_counts_after_its_restart(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Nothing is on record of the first call with a new certificate: the next one, after the restart, does as well."""
    folder = federation_template.copy(tmp_path / "coordinator")
    silo = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    async with running(folder) as at:
        await change(at, "rotate")
        connected = replace(load_credentials(silo), address=at.address)
        store_tls(silo, connected)
        async with kept_agent(silo_at(tmp_path / "again", connected, at.address), attend=False) as agent:
            await agent.certificate.renew()
            renewed = agent.stored
    async with running(folder) as at:
        rows = await at.service.authorities.rows()
        assert rows[1].unaware == (silo_of(BANK), silo_of(HOSPITAL))
        async with Silo(at, renewed) as hospital:
            with pytest.raises(Exception, match="plan_digest"):
                await hospital.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=hospital.key()))
        rows = await at.service.authorities.rows()
        assert rows[1].unaware == (silo_of(BANK),)


async def test_silo_that_enrolled_with_the_bundle_of_yesterday_is_waited_for(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """It asked for the trust bundle, a rotation came, and only then it sent its token."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        token = await at.invited("clinic-c")
        really = enrolment_client._spend

        async def after_a_rotation(*arguments: object, **named: object) -> SiloCredentials:
            await change(at, "rotate")
            return await really(*arguments, **named)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(enrolment_client, "_spend", after_a_rotation)
            clinic = await enrol(token, now=datetime.now(UTC), agent_version="test")
        assert len(clinic.trust.authorities) == 1
        (_, successor) = await at.service.authorities.rows()
        assert silo_of("clinic-c") in successor.unaware


# --- invitations across a succession
# ---------------------------------------------------------------------------------------


async def test_token_of_the_authority_before_is_good_until_that_one_is_retired(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        before, later = await at.invited("clinic-c"), await at.invited("clinic-d")
        await change(at, "rotate")
        await change(at, "activate", force=True)
        assert before.ca_pin != at.coordinator.keys.authorities.pin
        enrolled = await enrol(before, now=datetime.now(UTC), agent_version="test")
        assert directly_issued(enrolled.certificate, by=at.coordinator.keys.authority.certificate)
        assert enrolled.trust.digest == at.coordinator.keys.trust_digest
        rows = {one.standing.name: one for one in await at.service.authorities.rows()}
        assert rows["ca"].pinned_until_unix_s == later.expires_at
        assert rows["ca-2"].pinned_until_unix_s == 0.0
        assert await change(at, "retire", force=True) == {"ca-2": "issuing"}
        assert at.service.enrolment.invited() == ()
        await until_closed(at)
        await at.invited("dentist-d")  # so that somebody answers
        with pytest.raises(AuthenticationError, match="an authority that was retired since: ask for a new invitation"):
            await enrol(later, now=datetime.now(UTC), agent_version="test")
        again = await at.enrolled("clinic-d")
        assert again.trust == at.coordinator.keys.trust


async def test_a_token_of_a_retired_authority_is_refused_by_the_coordinator_whoever_brings_it(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Who stole the authority's key heard the secret in the middle, and spends it at the coordinator with keys of its
    own."""
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder) as at:
        await change(at, "rotate")
        overheard = await at.invited("clinic-c")
        await change(at, "activate", force=True)
        fresh = await at.invited("dentist-d")  # pins the successor: stays open
        await change(at, "retire", force=True)
        with pytest.raises(AuthenticationError, match="this token of silo clinic-c was voided"):
            await enrol(replace(overheard, ca_pin=fresh.ca_pin), now=datetime.now(UTC), agent_version="test")
        assert at.service.enrolment.invited() == ("dentist-d",)
        await enrol(fresh, now=datetime.now(UTC), agent_version="test")


async def test_invitations_that_pin_nothing_are_void_after_a_kill_between_the_steps_of_a_retirement(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder) as at:
        await at.invited("clinic-c")
    keys = Authorities.load(folder.keys)
    keys.rotate(datetime.now(UTC))
    keys.activate()
    keys.retire("ca", datetime.now(UTC))
    async with running(folder) as at:
        assert at.service.enrolment.invited() == ()


async def test_attack_successor_that_the_pinned_authority_did_not_name(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Whoever relays the trust bundle to a newcomer adds an authority: it is not led to from the pin, and not kept."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        await change(at, "rotate")
        keys = at.coordinator.keys
        old, new = keys.trust.authorities
        evil = Authority.create(FEDERATION, now=datetime.now(UTC)).certificate
        bundle = TrustBundle((evil, old, new))
        (honest,) = keys.authority_successions
        assert bundle.pinned(spki_pin(old), [honest]) == TrustBundle((old, new))
        assert bundle.pinned(spki_pin(old)) == TrustBundle((old,))
        for lie in (replace(honest, signature=b"x" * 70), replace(honest, successor=certificate_digest(evil))):
            assert bundle.pinned(spki_pin(old), [lie]) == TrustBundle((old,))


# --- an institution's CA
# ---------------------------------------------------------------------------------------------------


def openssl(folder: Path, *arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], cwd=folder, check=True, capture_output=True)


def institution(folder: Path) -> None:
    """A root CA, an intermediate below it, as an institution has them: root.pem, intermediate.pem, intermediate.key."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        folder,
        "req",
        "-x509",
        *key,
        "-keyout",
        "root.key",
        "-out",
        "root.pem",
        "-subj",
        "/CN=Institution Root",
        "-days",
        "3650",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    )
    openssl(
        folder,
        "req",
        "-new",
        *key,
        "-keyout",
        "intermediate.key",
        "-out",
        "intermediate.csr",
        "-subj",
        "/CN=Institution Issuing",
    )
    (folder / "intermediate.ext").write_text(
        "basicConstraints=critical,CA:TRUE,pathlen:1\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    openssl(
        folder,
        "x509",
        "-req",
        "-in",
        "intermediate.csr",
        "-CA",
        "root.pem",
        "-CAkey",
        "root.key",
        "-CAcreateserial",
        "-days",
        "1825",
        "-extfile",
        "intermediate.ext",
        "-out",
        "intermediate.pem",
    )
    (folder / "chain.pem").write_bytes((folder / "intermediate.pem").read_bytes() + (folder / "root.pem").read_bytes())


def sign_with_openssl(folder: Path, *more: str) -> None:
    """What the institution makes of request.pem, with the extensions that it asks for: signed.pem."""
    openssl(
        folder,
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-CA",
        "intermediate.pem",
        "-CAkey",
        "intermediate.key",
        "-CAcreateserial",
        "-days",
        "365",
        "-copy_extensions",
        "copyall",
        *more,
        "-out",
        "signed.pem",
    )


async def test_authority_that_openssl_certified_enrols_orders_and_renews(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    institution(tmp_path)
    async with running(folder, offer="default") as at:
        silo = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
        async with kept_agent(silo) as hospital, Silo(at, federation_template.silos[BANK]):
            await hospital.order(Prepare)

            def command(*arguments: str | Path) -> str:
                done = run_command(coordinator_main, *arguments, "--dir", folder.root)
                assert (done.code, done.err) == (0, ""), done.err
                return done.out

            (tmp_path / "request.pem").write_bytes(at.coordinator.keys.authorities.request())
            sign_with_openssl(tmp_path)
            read = {name: (tmp_path / name).read_bytes() for name in ("signed.pem", "chain.pem")}
            pems = {"certificate_pem": read["signed.pem"], "chain_pem": read["chain.pem"]}
            assert await change(at, "adopt", **pems) == {"ca": "issuing", "ca-2": "successor"}
            assert not (folder.keys / "request.key").exists()
            await hospital.until(lambda: len(hospital.stored.trust.authorities) == 2)
            await change(at, "activate", force=True)

            root = x509.load_pem_x509_certificate((tmp_path / "root.pem").read_bytes())
            token = await at.invited("clinic-c")
            assert token.ca_pin == spki_pin(root)
            clinic = silo_at(
                tmp_path / "clinic", await enrol(token, now=datetime.now(UTC), agent_version="test"), at.address
            )
            async with kept_agent(clinic) as newcomer:
                await newcomer.order(Prepare)
                await newcomer.certificate.renew()
                signed = x509.load_pem_x509_certificate(read["signed.pem"])
                assert directly_issued(newcomer.stored.certificate, by=signed)
                # The institution's own authorities are believed by nobody here.
                assert root not in newcomer.stored.trust.authorities
            await hospital.certificate.renew()
            assert directly_issued(hospital.stored.certificate, by=signed)
            assert hospital.problems == []
            assert at.coordinator.keys.authorities.chain[-1] == root
    assert Coordinator.load(folder).keys.authorities.pin == spki_pin(root)
    exported = tmp_path / "ca.p12"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORICA_CA_PASSPHRASE", PASSPHRASE)
        command("ca", "export", exported)
    openssl(tmp_path, "pkcs12", "-in", exported, "-passin", f"pass:{PASSPHRASE}", "-nokeys", "-out", "read.pem")
    assert (tmp_path / "read.pem").read_text().count("BEGIN CERTIFICATE") == 3


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (), "does not name federation"),
        (lambda folder: ("basicConstraints=critical,CA:FALSE",), "signs leaves alone"),
        (lambda folder: ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"), "signs leaves alone"),
        (
            lambda folder: (
                "basicConstraints=critical,CA:TRUE,pathlen:0",
                "keyUsage=critical,keyCertSign,cRLSign",
                "subjectAltName=URI:spiffe://other-net",
            ),
            "does not name federation",
        ),
    ],
    ids=["no-extensions", "no-ca", "path-length", "other-federation"],
)
def test_what_an_institution_signed_otherwise_is_refused(
    federation_template: FederationTemplate, tmp_path: Path, spoil: Callable[[Path], tuple[str, ...]], words: str
) -> None:
    institution(tmp_path)
    folder = federation_template.copy(tmp_path / "coordinator")
    lines = spoil(tmp_path) or ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
    (tmp_path / "signed.ext").write_text("\n".join(lines) + "\n")
    assert run_command(coordinator_main, "ca", "request", tmp_path / "request.pem", "--dir", folder.root).code == 0
    openssl(
        tmp_path,
        "x509",
        "-req",
        "-in",
        "request.pem",
        "-CA",
        "intermediate.pem",
        "-CAkey",
        "intermediate.key",
        "-CAcreateserial",
        "-days",
        "9",
        "-extfile",
        "signed.ext",
        "-out",
        "signed.pem",
    )

    def taken(chain: str) -> object:
        arguments = ("ca", "import", tmp_path / "signed.pem", "--chain", tmp_path / chain, "--dir", folder.root)
        return run_command(coordinator_main, *arguments)

    taken("chain.pem").is_refusal(ConfigurationError, words)  # type: ignore[attr-defined]
    assert not (folder.keys / "authorities.json").exists()


def test_signed_certificate_for_another_key_or_without_its_chain_is_refused(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    institution(tmp_path)
    folder = federation_template.copy(tmp_path / "coordinator")

    def command(*arguments: str | Path):  # type: ignore[no-untyped-def]
        return run_command(coordinator_main, "ca", *arguments, "--dir", folder.root)

    signed, chain = tmp_path / "signed.pem", tmp_path / "chain.pem"
    assert command("request", tmp_path / "request.pem").code == 0
    sign_with_openssl(tmp_path)
    command("import", signed, "--chain", tmp_path / "root.pem").is_refusal(
        ConfigurationError, "every certificate above"
    )
    assert command("request", tmp_path / "another.pem").code == 0
    command("import", signed, "--chain", chain).is_refusal(ConfigurationError, "not for the key of the request")
    (folder.keys / "request.key").unlink()
    command("import", signed, "--chain", chain).is_refusal(StateError, "coordinator ca request")


# --- export, import
# ----------------------------------------------------------------------------------------------------------


def test_exported_authority_comes_back_on_a_machine_without_one(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    other = CoordinatorFolder(tmp_path / "other")
    files.make_private_folder(other.root)
    files.replace(other.settings, folder.settings.read_bytes())

    def command(at: CoordinatorFolder, *arguments: str | Path):  # type: ignore[no-untyped-def]
        return run_command(coordinator_main, "ca", *arguments, "--dir", at.root)

    backup = tmp_path / "ca.p12"
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", "short")
    command(folder, "export", backup).is_refusal(ConfigurationError, "at least 12")
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", PASSPHRASE)
    assert command(folder, "export", backup).code == 0
    assert backup.stat().st_mode & 0o777 == 0o600
    command(folder, "export", backup).is_refusal(ConfigurationError, "is there already")
    command(folder, "import", backup).is_refusal(ConfigurationError, "already holds an authority")
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", "another passphrase")
    command(other, "import", backup).is_refusal(ConfigurationError, "passphrase is another one")
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", PASSPHRASE)
    assert command(other, "import", backup).code == 0
    before, after = Authorities.load(folder.keys), Authorities.load(other.keys)
    assert after.trust == before.trust
    assert after.issuing.key_pem() == before.issuing.key_pem()


def test_commands_take_every_step_without_a_running_coordinator(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")

    def command(*arguments: str):  # type: ignore[no-untyped-def]
        return run_command(coordinator_main, "ca", *arguments, "--dir", folder.root)

    def listed() -> dict[str, str]:
        return {row["name"]: row["stage"] for row in json.loads(command("show", "--json").out)}

    assert listed() == {"ca": "issuing"}
    assert "successor" in command("rotate").out
    command("activate").is_refusal(StateError, HOSPITAL, BANK, "--force")
    assert command("activate", "--force").code == 0
    assert listed() == {"ca-2": "issuing", "ca": "trusted"}
    command("retire").is_refusal(StateError, HOSPITAL, BANK, "--force")
    assert command("retire", "--force").code == 0
    assert "ca-2" in command("show").out
    assert listed() == {"ca-2": "issuing"}


def test_the_key_of_an_authority_that_issues_no_more_is_overwritten(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """And that of a request: the disk would keep it, and with it the federation."""
    folder = federation_template.copy(tmp_path / "coordinator")
    keys = Authorities.load(folder.keys)
    institution(tmp_path)
    (tmp_path / "request.pem").write_bytes(keys.request())
    sign_with_openssl(tmp_path)
    for name in ("ca.key", "request.key"):
        os.link(folder.keys / name, tmp_path / name)
    keys.adopt((tmp_path / "signed.pem").read_bytes(), (tmp_path / "chain.pem").read_bytes(), datetime.now(UTC))
    keys.activate()
    for name in ("ca.key", "request.key"):
        assert not (folder.keys / name).exists()
        assert not any((tmp_path / name).read_bytes())
    assert Authorities.load(folder.keys).issuing.key_pem() == keys.issuing.key_pem()


# --- by itself, and killed between any two steps
# ----------------------------------------------------------------------------


def standing(name: str, stage: str, *, life: float = 900.0) -> AuthorityStanding:
    return AuthorityStanding(
        name=name,
        stage=stage,
        subject="CN=x",
        pin="",
        digest=name,
        begins_unix_s=0.0,
        expires_unix_s=life,
    )


def row(one: AuthorityStanding, *, unaware: str = "", dependent: str = "", pinned_until: float = 0.0) -> AuthorityRow:
    return AuthorityRow(
        standing=one,
        unaware=tuple(map(silo_of, unaware.split())),
        dependent=tuple(map(silo_of, dependent.split())),
        pinned_until_unix_s=pinned_until,
    )


def silo_of(name: str) -> Identity:
    return Identity(FEDERATION, Role.SILO, name)


def test_what_is_due_by_itself() -> None:
    first, second = standing("ca", "issuing"), standing("ca-2", "successor", life=9000.0)
    old, new = standing("ca", "trusted"), standing("ca-2", "issuing", life=9000.0)
    assert due_step([row(first)], 600.0) == ""
    assert due_step([row(first)], 601.0) == "rotate"
    assert due_step([row(first), row(second, unaware="bank-b")], 700.0) == ""
    assert due_step([row(first), row(second)], 700.0) == "activate"
    assert due_step([row(new), row(old, dependent="bank-b")], 700.0) == ""
    assert due_step([row(new), row(old, pinned_until=500.0)], 499.0) == ""
    assert due_step([row(new), row(old, pinned_until=500.0)], 500.0) == "retire"
    assert due_step([row(new)], 500.0) == ""


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["rotate", "adopt", "activate", "retire"])
def test_a_kill_between_any_two_writes_leaves_authorities_that_work(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Every write is cut off in turn, before and after: what a start finds issues, and trusts all that it did
    before."""
    now = datetime.now(UTC)
    if step == "adopt":
        institution(tmp_path)

    def prepared(root: Path) -> CoordinatorFolder:
        folder = federation_template.copy(root)
        keys = Authorities.load(folder.keys)
        if step in ("activate", "retire"):
            keys.rotate(now)
        if step == "retire":
            keys.activate()
        if step == "adopt":
            (tmp_path / "request.pem").write_bytes(keys.request())
            sign_with_openssl(tmp_path)
        return folder

    def take(keys: Authorities) -> None:
        match step:
            case "rotate":
                keys.rotate(now)
            case "adopt":
                keys.adopt(
                    (tmp_path / "signed.pem").read_bytes(), (tmp_path / "chain.pem").read_bytes(), datetime.now(UTC)
                )
            case "activate":
                keys.activate()
            case "retire":
                keys.retire("ca", now)

    outcomes = []
    for cut in range(20):
        folder = prepared(tmp_path / f"cut-{cut}")
        keys = Authorities.load(folder.keys)
        calls = 0

        def counted(real: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: object, **named: object) -> None:
                nonlocal calls
                for when in ("before", "after"):
                    if calls == cut:  # noqa: B023
                        raise Killed
                    calls += 1
                    if when == "before":
                        real(*arguments, **named)

            return call

        killed = False
        with monkeypatch.context() as patch:
            for name in ("replace", "write_private"):
                patch.setattr(authorities_module.files, name, counted(getattr(files, name)))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            try:
                take(keys)
            except Killed:
                killed = True
        found = Authorities.load(folder.keys)
        found.tidy()
        again = Authorities.load(folder.keys)
        certificate = again.issuing.issue(
            new_tls_key().public_key(), Identity(FEDERATION, Role.SILO, HOSPITAL), now=now, lifetime=timedelta(days=1)
        )
        assert again.trust.issuers_of(certificate)
        names = {member.name for member in again.members}
        assert {path.stem for path in folder.keys.glob("ca*.pem")} == names
        issuing_later = {member.name for member in again.members if member.stage.value != "trusted"}
        assert {path.stem for path in folder.keys.glob("ca*.key")} == issuing_later
        outcomes.append(tuple(sorted((member.name, member.stage.value) for member in again.members)))
        if not killed:
            break
    assert len(set(outcomes)) == 2  # the stages before the step and those after it, nothing between
    assert len(outcomes) > 2
