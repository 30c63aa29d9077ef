"""Enrolment against a real listener: nothing secret is said to a stranger, nothing wrong is kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from lorica.demo.ports import free_ports
from lorica_security.errors import AuthenticationError, IntegrityError, LoricaError, MalformedMessage, Unreachable
from lorica_security.identifiers import FederationName, Identity, Role
from lorica_security.identity.enrolment_token import EnrolmentToken
from lorica_security.pki.pins import spki_pin
from silo_agent.edges.wire.enrolment_client import enrol
from tests.support.connect_proxy import ConnectProxy
from tests.support.federation_peer import FEDERATION, SILO, EnrolmentPeer, FederationPeer, TestNet, tls_pair
from tests.support.tokens import mint

NET = TestNet.create()
IMPOSTOR = TestNet.create()  # the same names, another CA: what an intercepting proxy or an impostor has


def token_for(port: int, *, net: TestNet = NET, lifetime: timedelta = timedelta(hours=1)) -> EnrolmentToken:
    return mint(
        federation=FEDERATION,
        silo=SILO,
        ca_pin=spki_pin(net.authority.certificate),
        host="127.0.0.1",
        port=port,
        now=datetime.now(UTC),
        lifetime=lifetime,
    )


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnrolmentPeer]:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with EnrolmentPeer(NET, address="127.0.0.1:4711") as listening:
        yield listening


async def enrolled(token: EnrolmentToken) -> object:
    return await enrol(token, now=datetime.now(UTC), agent_version="test")


async def test_a_token_becomes_a_certificate_for_a_key_that_was_made_here(peer: EnrolmentPeer) -> None:
    token = token_for(peer.port)
    credentials = await enrol(token, now=datetime.now(UTC), agent_version="test")
    assert credentials.identity == Identity(FEDERATION, Role.SILO, SILO)
    assert credentials.certificate.public_key() == credentials.tls_key.public_key()
    assert credentials.trust.authorities == (NET.authority.certificate,)
    assert credentials.coordinator_key == NET.coordinator_key.public_key()
    assert credentials.address == "127.0.0.1:4711"
    (request,) = peer.requests
    assert request.token_secret == token.secret
    assert credentials.tls_key_pem not in request.SerializeToString()


async def test_a_connection_that_is_lost_in_the_handshake_is_no_impostor(peer: EnrolmentPeer) -> None:
    seen: list[int] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(len(seen))
        if len(seen) == 2:  # the first is the look at the certificate
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", peer.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    target.write(data)
            target.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await enrolled(token_for(port))
    assert len(seen) == 4  # and another look before the second try
    assert len(peer.requests) == 1


async def test_an_impostor_with_another_ca_never_sees_the_secret(peer: EnrolmentPeer) -> None:
    async with EnrolmentPeer(IMPOSTOR) as impostor:
        with pytest.raises(AuthenticationError, match="impostor stands between, so the token was not sent"):
            await enrolled(token_for(impostor.port))
        assert impostor.requests == []


async def test_an_impostor_that_hands_out_the_true_ca_never_sees_the_secret(peer: EnrolmentPeer) -> None:
    async with EnrolmentPeer(IMPOSTOR) as impostor:
        impostor.bundle = NET.authority.certificate_pem()
        with pytest.raises(AuthenticationError, match="token was not sent"):
            await enrolled(token_for(impostor.port))
        assert impostor.requests == []


async def test_a_silo_of_the_federation_cannot_pose_as_the_coordinator(peer: EnrolmentPeer) -> None:
    silo_pair = tls_pair(NET.authority, Identity(FEDERATION, Role.SILO, "bank-b"))
    posing = TestNet(NET.authority, NET.coordinator_key, silo_pair)
    async with EnrolmentPeer(posing) as impostor:
        with pytest.raises(AuthenticationError, match="token was not sent"):
            await enrolled(token_for(impostor.port))
        assert impostor.requests == []


async def test_the_coordinator_of_another_federation_never_sees_the_secret(peer: EnrolmentPeer) -> None:
    other = TestNet.create(FederationName("other-net"))
    async with EnrolmentPeer(other) as stranger:
        with pytest.raises(AuthenticationError, match="token was not sent"):
            await enrolled(token_for(stranger.port, net=other))
        assert stranger.requests == []


async def test_enrolment_goes_through_a_connect_proxy(peer: EnrolmentPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ConnectProxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:pass%40word@127.0.0.1:{proxy.port}")
        await enrolled(token_for(peer.port))
        assert proxy.targets == [f"127.0.0.1:{peer.port}"] * 2  # the look and the channel
        assert all("Basic dXNlcjpwYXNzQHdvcmQ=" in head for head in proxy.heads)
    assert len(peer.requests) == 1


async def test_a_tls_intercepting_proxy_is_told_apart_and_never_sees_the_secret(
    peer: EnrolmentPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        EnrolmentPeer(IMPOSTOR) as interception,
        ConnectProxy(lead_to=("127.0.0.1", interception.port)) as proxy,
    ):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(AuthenticationError, match=r"through the proxy 127\.0\.0\.1:\d+ .*TLS-intercepting proxy"):
            await enrolled(token_for(peer.port))
        assert interception.requests == peer.requests == []


async def test_no_proxy_goes_around_the_proxy(peer: EnrolmentPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ConnectProxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.0/8")
        await enrolled(token_for(peer.port))
        assert proxy.targets == []


async def test_a_proxy_that_refuses_the_tunnel_is_named(peer: EnrolmentPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ConnectProxy(refusal="407 Proxy Authentication Required") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(Unreachable, match="407 Proxy Authentication Required"):
            await enrolled(token_for(peer.port))


async def test_an_expired_token_is_refused_before_anything_is_dialled(peer: EnrolmentPeer) -> None:
    token = token_for(1, lifetime=timedelta(seconds=1))
    with pytest.raises(AuthenticationError, match="expired"):
        await enrol(token, now=datetime.now(UTC) + timedelta(minutes=1), agent_version="test")


async def test_a_certificate_for_another_silo_is_refused(peer: EnrolmentPeer) -> None:
    peer.issue_for = Identity(FEDERATION, Role.SILO, "bank-b")
    with pytest.raises(AuthenticationError, match="bank-b"):
        await enrolled(token_for(peer.port))


async def test_a_certificate_for_another_key_is_refused(peer: EnrolmentPeer) -> None:
    peer.issue_other_key = True
    with pytest.raises(IntegrityError, match="another key"):
        await enrolled(token_for(peer.port))


@pytest.mark.parametrize("address", ["", "nowhere", "host:0", "host:99999", "../etc:1", "UPPER:1"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    async with EnrolmentPeer(NET, address=address) as peer:
        with pytest.raises(MalformedMessage, match="address"):
            await enrolled(token_for(peer.port))


async def test_a_spent_token_is_the_coordinators_word(peer: EnrolmentPeer) -> None:
    peer.refuse = AuthenticationError("the token for hospital-a was used already")
    with pytest.raises(AuthenticationError, match="used already"):
        await enrolled(token_for(peer.port))


async def test_nobody_there_is_said_so() -> None:
    with pytest.raises(LoricaError, match=r"nobody takes tokens at .* the coordinator does not run"):
        await enrolled(token_for(*free_ports(1)))


@pytest.mark.parametrize("federation", [FEDERATION, FederationName("other-net")])
async def test_a_closed_port_is_told_from_a_coordinator_that_does_not_run(
    federation: FederationName,
) -> None:
    """By whoever listens for silos at the port before it; somebody of another federation there is not the
    coordinator."""
    closed = ports_that_follow()
    listening = FederationPeer(TestNet.create(federation))
    await listening.listen(closed - 1)
    try:
        with pytest.raises(Unreachable, match=f"nobody takes tokens at 127.0.0.1:{closed} now") as caught:
            await enrolled(token_for(closed))
    finally:
        await listening.close()
    runs = f"the coordinator of {FEDERATION} runs: it answers at 127.0.0.1:{closed - 1}. So this token was used, replaced or voided"
    assert (runs in str(caught.value)) is (federation == FEDERATION)
    assert ("does not run" in str(caught.value)) is (federation != FEDERATION)


def ports_that_follow() -> int:
    """The second of two free ports, the first of which is the one before it."""
    first, second = free_ports(2)
    while first + 1 != second:
        first, second = second, *free_ports(1)
    return second
