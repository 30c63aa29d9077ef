"""What a stranger with the openssl command line, or with gRPC and no certificate, gets from a real coordinator's
ports."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support.coordinator import FederationTemplate, RunningCoordinator, channel_to, federation_template, running
from tests.support.every_call import FEDERATION_CALLS, OPERATOR_CALLS

__all__ = ["federation_template"]

REFLECTION = (
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.Health/Check",
    "/grpc.channelz.v1.Channelz/GetServers",
)
DOCS = Path(__file__).resolve().parents[2] / "ops" / "docs"


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    """With an invitation open, so that both ports listen."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        await coordinator.invited("newcomer")
        yield coordinator


async def openssl(port: int, *arguments: str) -> tuple[int, str]:
    if shutil.which("openssl") is None:
        pytest.skip(
            "the openssl command line is not installed (Debian: apt-get install openssl): ports not probed with it"
        )

    def probe() -> tuple[int, str]:
        done = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-alpn", "h2", *arguments],
            input=b"",
            capture_output=True,
            timeout=30,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).decode(errors="replace")

    return await asyncio.to_thread(probe)


@pytest.mark.parametrize("version", ["-tls1", "-tls1_1", "-tls1_2"])
async def test_no_version_of_tls_below_1_3(at: RunningCoordinator, version: str) -> None:
    for port in (at.silos_port, at.enrolment_port):
        code, said = await openssl(port, version, "-cipher", "ALL:@SECLEVEL=0")
        assert code != 0, said
        assert "New, (NONE), Cipher is (NONE)" in said


async def test_tls_1_3_with_the_groups_and_ciphers_of_today(at: RunningCoordinator) -> None:
    for port in (at.silos_port, at.enrolment_port):
        _, said = await openssl(port, "-tls1_3")
        assert "New, TLSv1.3, Cipher is TLS_" in said, said
        assert "ALPN protocol: h2" in said
        assert "Server public key is 256 bit" in said
        assert "Compression: NONE" in said


async def test_a_client_certificate_is_asked_for_on_one_port_and_on_the_other_not(at: RunningCoordinator) -> None:
    _, of_silos = await openssl(at.silos_port, "-tls1_3")
    _, of_enrolment = await openssl(at.enrolment_port, "-tls1_3")
    assert "Acceptable client certificate CA names" in of_silos or "Requested Signature Algorithms" in of_silos
    assert "No client certificate CA names sent" in of_enrolment
    assert "Requested Signature Algorithms" not in of_enrolment


async def test_no_call_is_answered_without_a_certificate(at: RunningCoordinator) -> None:
    roots = at.coordinator.keys.trust.to_pem()
    async with channel_to(at.address, roots) as channel:
        calls = [
            f"/{method.containing_service.full_name}/{method.name}" for method in (*FEDERATION_CALLS, *OPERATOR_CALLS)
        ]
        assert len(calls) > 10
        for method in (*calls, *REFLECTION):
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, method


async def test_there_is_no_reflection_health_or_debugging_service_for_anybody(at: RunningCoordinator) -> None:
    roots, pair = at.coordinator.keys.trust.to_pem(), at.coordinator.keys.operator_pair(datetime.now(UTC))
    operators = channel_to(at.address, roots, key_pem=pair.key_pem, certificate_pem=pair.certificate_pem)
    strangers = channel_to(f"127.0.0.1:{at.enrolment_port}", roots)
    for channel in (operators, strangers):
        async with channel:
            for method in REFLECTION:
                call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, method


@pytest.mark.parametrize("name", ["hardening.md", "silo-it.md"])
def test_the_example_for_the_packet_filter_is_one(name: str) -> None:
    if shutil.which("nft") is None:
        pytest.skip(f"nft is not installed (Debian: apt-get install nftables): the example of {name} not parsed")
    page = (DOCS / name).read_text(encoding="utf-8")
    (rules,) = [part.split("```")[0] for part in page.split("```nft\n")[1:]]
    done = subprocess.run(
        ["nft", "-c", "-f", "-"], input=rules, capture_output=True, text=True, timeout=30, check=False
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"nft asks the kernel, which wants CAP_NET_ADMIN: the example of {name} not parsed")
    assert done.returncode == 0, done.stderr
