"""The real client against a real mutual TLS server that is honest, unlucky or hostile."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from lorica.demo.ports import free_ports
from lorica_security.audit.chain import Head
from lorica_security.errors import (
    AuthenticationError,
    Conflict,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    OutsideValidity,
    StorageError,
    Unreachable,
    WrongTime,
)
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import new_identity_key, verify
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import Advertisement
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import RoundModel
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.codecs.orders_codec import order_to_wire
from silo_wire.manifest import manifest_of
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluation,
    Order,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
)
from silo_wire.plans.plan import MAX_BUNDLE_BYTES, PlanBundle
from silo_wire.statements import UPDATE_DOMAIN, update_statement
from silo_wire.v1 import federation_pb2
from tests.support.connect_proxy import ConnectProxy
from tests.support.federation_peer import (
    FEDERATION,
    SILO,
    FederationPeer,
    Lost,
    TestNet,
    small_bundle,
    tls_pair,
    vector_of,
)
from tests.support.secagg_federation import entropy, public_key

NET = TestNet.create()
BUNDLE = small_bundle()
DATA = vector_of(BUNDLE.layout, 1)  # 4000 bytes: three chunks of 1024 and one of 928
KEY = RoundKey(federation=FEDERATION, plan=BUNDLE.plan.digest, round=1, attempt=1)
SUMMARY = TrainingSummary(
    examples=9, loss_max=3.0, loss_min=1.0, loss_first=3.0, loss_last=1.0, optimizer_steps=7, seconds=2.0
)


class Client:
    """The client of one silo, its cache in a folder, and what it said about being unreachable."""

    def __init__(self, credentials: SiloCredentials, folder: Path) -> None:
        self.credentials = credentials
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.troubles: list[LoricaError] = []
        self._troubled = asyncio.Event()
        self.channel = mutual_channel(credentials)
        self.coordinator = GrpcCoordinator(
            channel=self.channel,
            credentials=credentials,
            models=ModelCache(folder, kept=2),
            agent_version="test",
            unreachable=self._unreachable,
            new_backoff=lambda: Backoff(first_s=0.01, most_s=0.05),
        )
        self.progress: list[float] = []

    def _unreachable(self, problem: LoricaError, _seconds: float) -> None:
        self.troubles.append(problem)
        self._troubled.set()

    async def first_trouble(self) -> None:
        async with asyncio.timeout(20):
            await self._troubled.wait()

    async def fetch(self, model: Digest, *, bundle: PlanBundle = BUNDLE, latest_round: int = 0) -> RoundModel:
        return await self.coordinator.fetch_model(
            plan=bundle.plan.digest,
            layout=bundle.layout,
            key=KEY,
            model=model,
            latest_round=latest_round,
            progress=self.progress.append,
        )


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FederationPeer]:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with FederationPeer(NET) as listening:
        yield listening


@pytest.fixture
async def client(peer: FederationPeer, tmp_path: Path) -> AsyncIterator[Client]:
    client = Client(NET.credentials(peer.address), tmp_path / "models")
    yield client
    await client.channel.close()


async def first_orders(client: Client, count: int) -> list[Order]:
    orders = client.coordinator.orders()
    got = []
    async with asyncio.timeout(20):
        async for order in orders:
            got.append(order)
            if len(got) == count:
                break
    await orders.aclose()  # type: ignore[attr-defined]  # an async generator behind the port's iterator
    return got


async def unreachable(client: Client) -> None:
    """A call finds no coordinator that it may talk to."""
    telling = asyncio.ensure_future(client.coordinator.declare_readiness(BUNDLE.plan.digest, ready=True, reason=""))
    await client.first_trouble()
    telling.cancel()
    await client.channel.close()


# ---- orders ---------------------------------------------------------------------------------------------------------


async def test_orders_come_again_after_the_line_was_cut_and_the_instance_stays(
    peer: FederationPeer, client: Client
) -> None:
    await peer.order(Prepare(BUNDLE.plan.digest))
    orders = client.coordinator.orders()
    assert await anext(orders) == Prepare(BUNDLE.plan.digest)
    waiting = asyncio.ensure_future(anext(orders))
    await asyncio.sleep(0)
    await peer.cut_streams()
    async with asyncio.timeout(20):
        assert await waiting == Prepare(BUNDLE.plan.digest)
    assert len(peer.instances) == 2
    assert len(set(peer.instances)) == 1
    await orders.aclose()  # type: ignore[attr-defined]


async def test_an_agent_that_starts_before_the_coordinator_waits_for_it(peer: FederationPeer, tmp_path: Path) -> None:
    await peer.close()
    (port,) = free_ports(1)
    client = Client(NET.credentials(f"127.0.0.1:{port}"), tmp_path / "models")
    waiting = asyncio.ensure_future(first_orders(client, 1))
    await client.first_trouble()
    await peer.listen(port)
    assert await waiting == [Standby(StandbyReason.NO_PLAN)]
    await client.channel.close()


async def test_a_second_agent_of_the_same_identity_ends(peer: FederationPeer, client: Client) -> None:
    peer.refuse_attending = Conflict("silo hospital-a is connected already: stop the other agent")
    with pytest.raises(Conflict, match="stop the other agent"):
        await first_orders(client, 1)


async def test_a_revoked_silo_ends(peer: FederationPeer, client: Client) -> None:
    peer.refuse_attending = AuthenticationError("certificate of hospital-a is revoked")
    with pytest.raises(AuthenticationError, match="revoked"):
        await first_orders(client, 1)


async def test_a_clock_that_is_wrong_somewhere_ends_no_agent(peer: FederationPeer, client: Client) -> None:
    """The coordinator's, who finds that the certificate has not begun: once it is right again the orders come."""
    peer.refuse_attending = OutsideValidity("certificate of hospital-a is not valid before noon: check the clock")
    orders = asyncio.ensure_future(first_orders(client, 1))
    await client.first_trouble()
    peer.refuse_attending = None
    assert await orders == [Standby(StandbyReason.NO_PLAN)]
    assert "check the clock" in str(client.troubles[0])


# ---- words ----------------------------------------------------------------------------------------------------------

HEAD = Head(3, digest_of(b"entry 3"))
MODEL = digest_of(b"model")
ATTEMPT = Attempt(federation=FEDERATION, plan=bytes.fromhex(KEY.plan), round=1, number=1, id=entropy("attempt"))
ADVERTISEMENT = Advertisement(attempt=ATTEMPT, silo=SILO, mask_key=public_key("mask"), box_key=public_key("box"))
SCORES = Evaluation(
    split="dev", examples=4, exact_matches=1, executed=0, execution_matches=0, loss_per_token=1.0, seconds=1.0
)
WORDS: dict[str, tuple[Callable[[GrpcCoordinator], Awaitable[object]], Callable[[FederationPeer], Sized]]] = {
    "DeclareReadiness": (
        lambda told: told.declare_readiness(BUNDLE.plan.digest, ready=False, reason="paused"),
        lambda peer: peer.readiness,
    ),
    "DeclareTrained": (lambda told: told.declare_trained(KEY, MODEL), lambda peer: peer.trained),
    "AnswerMask": (lambda told: told.answer_mask(KEY, ADVERTISEMENT), lambda peer: peer.answers),
    "DeclineRound": (lambda told: told.decline(KEY, DeclineReason.DATA, "no data"), lambda peer: peer.declined),
    "ReportEvaluation": (lambda told: told.report_evaluation(KEY, MODEL, SCORES), lambda peer: peer.evaluations),
    "CountersignLedger": (lambda told: told.countersign_ledger(HEAD, after=Head()), lambda peer: peer.ledger_reports),
}


@pytest.mark.parametrize("word", WORDS)
async def test_a_word_is_said_until_it_is_taken(peer: FederationPeer, client: Client, word: str) -> None:
    """Also to a coordinator that had no room for it, that was stopping, or whose clock was wrong for a while."""
    say, taken = WORDS[word]
    peer.fates[word] = [
        Lost.BEFORE,
        Lost.AFTER,
        StorageError("the disk is full"),
        OutsideValidity("certificate of hospital-a expired: set the clock"),
        Unreachable("the coordinator is stopping"),
    ]
    async with asyncio.timeout(20):
        await say(client.coordinator)
    assert not peer.fates[word]
    assert len(taken(peer)) == 2, "the one whose acknowledgement was lost, and the last"
    assert len(client.troubles) == 5


@pytest.mark.parametrize("word", WORDS)
async def test_a_word_whose_time_is_over_is_not_said_again(peer: FederationPeer, client: Client, word: str) -> None:
    say, taken = WORDS[word]
    peer.fates[word] = [Lost.BEFORE, WrongTime("round 1 is over: wait for the next order")]
    with pytest.raises(WrongTime, match="round 1 is over"):
        async with asyncio.timeout(20):
            await say(client.coordinator)
    assert not taken(peer)


async def test_an_order_for_another_federation_is_not_followed(peer: FederationPeer, client: Client) -> None:
    foreign = Train(key=replace(KEY, federation="other-net"), model=Digest("00" * 32), seconds_left=1.0)
    peer.raw_notices = [order_to_wire(foreign, SILO)]
    assert await first_orders(client, 1) == [Standby(StandbyReason.NO_PLAN)]
    assert "'other-net'" in str(client.troubles[0])


async def test_a_notice_without_an_order_is_not_followed(peer: FederationPeer, client: Client) -> None:
    peer.raw_notices = [federation_pb2.Notice()]
    assert await first_orders(client, 1) == [Standby(StandbyReason.NO_PLAN)]
    assert isinstance(client.troubles[0], MalformedMessage)


# ---- who is there ---------------------------------------------------------------------------------------------------


async def test_a_coordinator_of_another_ca_is_not_talked_to(peer: FederationPeer, tmp_path: Path) -> None:
    other = TestNet.create()
    client = Client(other.credentials(peer.address), tmp_path / "models")
    await unreachable(client)
    assert peer.readiness == []


async def test_a_silo_of_the_federation_that_listens_is_not_taken_for_the_coordinator(tmp_path: Path) -> None:
    pair = tls_pair(NET.authority, Identity(FEDERATION, Role.SILO, "bank-b"))
    async with FederationPeer(TestNet(NET.authority, NET.coordinator_key, pair)) as impostor:
        client = Client(NET.credentials(impostor.address), tmp_path / "models")
        await unreachable(client)
        assert impostor.readiness == []


async def test_an_expired_certificate_gets_no_answer(tmp_path: Path) -> None:
    net = TestNet.create(age=timedelta(days=30))
    async with FederationPeer(net) as peer:
        client = Client(net.credentials(peer.address, age=timedelta(days=20)), tmp_path / "models")
        await unreachable(client)
        assert peer.readiness == []
        assert "this silo's certificate expired at" in str(client.troubles[0])


async def test_a_clock_from_before_the_certificate_is_named(peer: FederationPeer, tmp_path: Path) -> None:
    client = Client(NET.credentials(peer.address, age=timedelta(hours=-3)), tmp_path / "models")
    await unreachable(client)
    assert peer.readiness == []
    assert "is not valid before" in str(client.troubles[0])
    assert "check the clock" in str(client.troubles[0])


async def test_everything_goes_through_a_connect_proxy(
    peer: FederationPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = peer.offer(BUNDLE, DATA)
    async with ConnectProxy() as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        client = Client(NET.credentials(peer.address), tmp_path / "models")
        assert await first_orders(client, 1) == [Standby(StandbyReason.NO_PLAN)]
        assert (await client.fetch(model.digest)).file.read_bytes() == DATA
        assert set(proxy.targets) == {peer.address}
        await client.channel.close()


async def test_a_tls_intercepting_proxy_is_not_talked_through(
    peer: FederationPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        FederationPeer(TestNet.create()) as interception,
        ConnectProxy(lead_to=("127.0.0.1", interception.port)) as proxy,
    ):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        client = Client(NET.credentials(peer.address), tmp_path / "models")
        await unreachable(client)
        assert proxy.targets
        assert interception.readiness == peer.readiness == []


# ---- plans ----------------------------------------------------------------------------------------------------------


async def test_a_plan_arrives_in_chunks(peer: FederationPeer, client: Client) -> None:
    peer.bundles[BUNDLE.plan.digest] = BUNDLE
    assert await client.coordinator.fetch_plan(BUNDLE.plan.digest) == BUNDLE


async def test_another_plan_than_the_one_asked_for_is_refused(peer: FederationPeer, client: Client) -> None:
    peer.bundles[BUNDLE.plan.digest] = small_bundle(seed=7)
    with pytest.raises(IntegrityError, match="digest that was asked for"):
        await client.coordinator.fetch_plan(BUNDLE.plan.digest)


async def test_a_bundle_file_named_like_a_path_is_refused(peer: FederationPeer, client: Client) -> None:
    def add_file(raw: bytes) -> bytes:
        message = federation_pb2.PlanBundle.FromString(raw)
        message.files.add(name="../../.ssh/authorized_keys", content=b"x")
        return message.SerializeToString()

    peer.bundles[BUNDLE.plan.digest] = BUNDLE
    peer.change_bundle = add_file
    with pytest.raises(MalformedMessage, match="authorized_keys"):
        await client.coordinator.fetch_plan(BUNDLE.plan.digest)


async def test_a_plan_that_names_a_path_is_refused(peer: FederationPeer, client: Client) -> None:
    value = json.loads(BUNDLE.plan.to_json())
    value["model"]["files"]["../config.json"] = "00" * 32
    raw = canonical_json(value)
    message = federation_pb2.PlanBundle(plan_json=raw).SerializeToString()
    peer.bundles[digest_of(raw)] = BUNDLE
    peer.change_bundle = lambda _raw: message
    with pytest.raises(MalformedMessage, match="not a file that a plan bundle may hold"):
        await client.coordinator.fetch_plan(digest_of(raw))


async def test_a_bundle_without_end_is_cut_off(peer: FederationPeer, client: Client) -> None:
    peer.endless_bundle = True
    with pytest.raises(MalformedMessage, match=f"more than the {MAX_BUNDLE_BYTES} bytes"):
        await client.coordinator.fetch_plan(BUNDLE.plan.digest)


# ---- models ---------------------------------------------------------------------------------------------------------


async def test_a_model_is_fetched_once_and_then_comes_from_the_cache(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    fetched = await client.fetch(model.digest)
    file = client.folder / f"{model.digest}.model"
    assert fetched == RoundModel(file=file, manifest=model.header.manifest, mark=mark_of(file))
    assert fetched.file.read_bytes() == DATA
    assert client.progress == [0.25, 0.5, 0.75, 1.0]
    assert await client.fetch(model.digest) == fetched
    assert peer.first_chunks == [0]


async def test_a_cut_download_goes_on_at_the_chunk_held(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    peer.cut_model_after = 2
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA
    assert peer.first_chunks == [0, 2]


async def test_a_download_goes_on_after_a_restart_and_damaged_chunks_are_fetched_again(
    peer: FederationPeer, client: Client
) -> None:
    model = peer.offer(BUNDLE, DATA)
    cache = ModelCache(client.folder, kept=2)
    partial = cache.open_partial(model.digest, model.header)
    for index in range(3):
        partial.append(DATA[index * 1024 : (index + 1) * 1024])
    partial.close()
    part = client.folder / f"{model.digest}.part"
    damaged = bytearray(part.read_bytes())
    damaged[1500] ^= 1
    part.write_bytes(damaged)
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA
    assert peer.first_chunks == [1]


async def test_a_damaged_model_in_the_cache_is_fetched_again(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    fetched = await client.fetch(model.digest)
    fetched.file.write_bytes(DATA[:-1] + b"\xff")
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA


async def test_a_replaced_chunk_is_refused_and_not_kept(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    peer.change_chunk = lambda index, data: b"\0" * len(data) if index == 1 else data
    with pytest.raises(IntegrityError, match="chunk 1"):
        await client.fetch(model.digest)
    assert not (client.folder / f"{model.digest}.model").exists()
    assert (client.folder / f"{model.digest}.part").stat().st_size <= 1024


async def test_a_chunk_that_is_too_long_is_refused(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    peer.change_chunk = lambda index, data: data + b"\0" * 1000
    with pytest.raises(MalformedMessage, match="chunk 0 has 2024 bytes"):
        await client.fetch(model.digest)


async def test_a_model_signed_by_another_key_is_refused(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA, key=new_identity_key())
    with pytest.raises(IntegrityError, match="round-model"):
        await client.fetch(model.digest)
    assert list(client.folder.iterdir()) == []


async def test_a_signature_for_another_plan_cannot_be_replayed(peer: FederationPeer, client: Client) -> None:
    other = small_bundle(seed=7)
    model = peer.offer(other, DATA)
    with pytest.raises(IntegrityError, match="round-model"):
        await client.fetch(model.digest)


async def test_a_model_that_is_kept_from_another_plan_is_fetched_anew_under_its_own_signature(
    peer: FederationPeer, client: Client
) -> None:
    other = small_bundle(seed=7)
    first = peer.offer(other, DATA)
    await client.fetch(first.digest, bundle=other)
    again = peer.offer(BUNDLE, DATA)
    assert again.digest == first.digest
    assert (await client.fetch(again.digest)).file.read_bytes() == DATA


async def test_a_signature_for_another_round_cannot_be_replayed(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    peer.change_header = lambda header: replace(header, round=1)
    with pytest.raises(IntegrityError, match="round-model"):
        await client.fetch(model.digest, latest_round=1)


async def test_a_model_of_a_later_round_than_the_order_is_refused(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA, made_by=5)
    with pytest.raises(IntegrityError, match="of round 5, which comes after 4"):
        await client.fetch(model.digest, latest_round=4)


async def test_another_model_than_the_order_names_is_refused(peer: FederationPeer, client: Client) -> None:
    ordered, other = peer.offer(BUNDLE, DATA), peer.offer(BUNDLE, vector_of(BUNDLE.layout, 2))
    peer.models[ordered.digest] = other
    with pytest.raises(IntegrityError, match=f"hands out {other.digest}"):
        await client.fetch(ordered.digest)


async def test_a_model_of_another_layout_is_refused(peer: FederationPeer, client: Client) -> None:
    wrong = small_bundle(elements=999)
    model = peer.offer(wrong, vector_of(wrong.layout, 1))
    with pytest.raises(MalformedMessage, match="another layout"):
        await client.fetch(model.digest)


async def test_the_cache_keeps_the_newest_models_alone(peer: FederationPeer, client: Client) -> None:
    digests = [peer.offer(BUNDLE, vector_of(BUNDLE.layout, number)).digest for number in range(4)]
    for digest in digests:
        await client.fetch(digest)
    assert {path.name for path in client.folder.iterdir()} == {
        f"{digest}.{kind}" for digest in digests[-2:] for kind in ("model", "header")
    }
    await client.fetch(digests[-2])
    await client.fetch(peer.offer(BUNDLE, vector_of(BUNDLE.layout, 9)).digest)
    assert not (client.folder / f"{digests[-1]}.model").exists(), "the one that was asked for longer ago"


async def test_a_download_is_written_into_the_file_of_a_model_that_nobody_needs(
    peer: FederationPeer, client: Client
) -> None:
    """Also one that is longer; what the file held counts for nothing."""
    long = small_bundle(elements=5000)
    old = peer.offer(long, vector_of(long.layout, 1))
    inode = (await client.fetch(old.digest, bundle=long)).file.stat().st_ino
    other = await client.fetch(peer.offer(BUNDLE, vector_of(BUNDLE.layout, 2)).digest)
    assert other.file.stat().st_ino != inode
    peer.cut_model_after = 2
    model = peer.offer(BUNDLE, DATA)
    fetched = await client.fetch(model.digest)
    assert fetched.file.stat().st_ino == inode
    assert fetched.file.read_bytes() == DATA
    assert peer.first_chunks[-2:] == [0, 2]
    assert other.file.exists()


async def test_where_one_model_is_kept_it_stays_until_the_next_is_here(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    cache = ModelCache(tmp_path / "models", kept=1)
    model = peer.offer(BUNDLE, DATA)
    held = (await client.fetch(model.digest)).file
    cache.prune(Digest("ab" * 32), coming=True)
    assert held.exists()
    cache.prune(Digest("ab" * 32))
    assert [path.name for path in client.folder.iterdir()] == ["spare"]


async def test_a_file_that_happens_to_hold_the_model_already_is_no_stumbling_block(
    peer: FederationPeer, client: Client
) -> None:
    """Its chunks were asked for before anybody looked."""
    model = peer.offer(BUNDLE, DATA)
    client.folder.joinpath("spare").write_bytes(DATA)
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA


async def test_a_model_that_another_process_reads_is_not_written_over(peer: FederationPeer, client: Client) -> None:
    model = peer.offer(BUNDLE, DATA)
    await client.fetch(model.digest)
    with ModelCache(client.folder, kept=2).held(model.digest, client.folder.parent) as file:
        assert file is not None
        for number in range(2, 6):
            await client.fetch(peer.offer(BUNDLE, vector_of(BUNDLE.layout, number)).digest)
        assert file.read_bytes() == DATA


async def test_what_this_process_has_checked_is_not_checked_again_until_the_file_changes(
    peer: FederationPeer, client: Client
) -> None:
    model = peer.offer(BUNDLE, DATA)
    fetched = await client.fetch(model.digest)
    status = fetched.file.stat()
    damage(fetched.file)
    os.utime(fetched.file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert await client.fetch(model.digest) == fetched, "as if nothing had happened: no digest was computed"
    assert ModelCache(client.folder, kept=2).whole(model.digest, fetched.manifest) is None, "another process looks"
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA
    damage(fetched.file)
    os.utime(fetched.file, (0, 0))  # a clock of some milliseconds would show no change so soon
    assert (await client.fetch(model.digest)).file.read_bytes() == DATA, "a change that shows"
    assert peer.first_chunks == [0, 0, 0]


async def test_no_more_than_8_mib_of_a_cut_download_is_sent_twice(peer: FederationPeer, client: Client) -> None:
    """48 chunks of 1 MiB, cut after 20: what had arrived is kept, and the agent is told nothing that it must repeat."""
    bundle = small_bundle(elements=12 << 20)
    data = bytes(48 << 20)
    model = peer.offer(bundle, data, chunk_bytes=1 << 20)
    peer.cut_model_after = 20
    fetched = await client.fetch(model.digest, bundle=bundle)
    assert fetched.file.stat().st_size == len(data)
    first, second = peer.first_chunks
    assert first == 0
    assert 12 <= second <= 20


def mark_of(file: Path) -> FileMark:
    with file.open("rb") as opened:
        return FileMark.of(opened.fileno())


def damage(file: Path) -> None:
    """One byte of the second chunk is another."""
    with file.open("r+b") as opened:
        opened.seek(1500)
        byte = opened.read(1)[0]
        opened.seek(1500)
        opened.write(bytes([byte ^ 1]))


# ---- updates --------------------------------------------------------------------------------------------------------


def saved_update(folder: Path, *, number: int = 9) -> tuple[SavedUpdate, Path]:
    data = vector_of(BUNDLE.layout, number)
    file = folder / "update.delta"
    file.write_bytes(data)
    manifest = manifest_of(BUNDLE.layout, [data], 1024)
    return SavedUpdate(key=KEY, model=Digest("ab" * 32), manifest=manifest, summary=SUMMARY), file


async def test_an_update_arrives_whole_and_signed_for_this_attempt_alone(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    update, file = saved_update(tmp_path)
    await client.coordinator.upload(update, file, progress=client.progress.append)
    received = peer.updates[update.manifest.digest]
    assert received.data == file.read_bytes()
    assert (received.header.key, received.header.summary, received.header.model) == (KEY, SUMMARY, update.model)
    statement = update_statement(key=KEY, silo=SILO, model=update.model, update=update.manifest.digest, summary=SUMMARY)
    verify(
        client.credentials.identity_key.public_key(),
        domain=UPDATE_DOMAIN.encode(),
        payload=statement,
        signature=received.header.signature,
    )
    assert client.progress[-1] == 1.0


async def test_a_cut_upload_goes_on_where_the_coordinator_holds_it(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    update, file = saved_update(tmp_path)
    peer.cut_upload_after = 2
    await client.coordinator.upload(update, file, progress=client.progress.append)
    received = peer.updates[update.manifest.digest]
    assert received.data == file.read_bytes()
    assert received.header.first_chunk == 2


async def test_an_update_that_is_committed_is_not_sent_again(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    update, file = saved_update(tmp_path)
    await client.coordinator.upload(update, file, progress=client.progress.append)
    file.unlink()
    await client.coordinator.upload(update, file, progress=client.progress.append)


async def test_an_update_file_that_changed_on_disk_never_leaves(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    update, file = saved_update(tmp_path)
    changed = bytearray(file.read_bytes())
    changed[2000] ^= 1
    file.write_bytes(changed)
    with pytest.raises(IntegrityError, match="chunk 1"):
        await client.coordinator.upload(update, file, progress=client.progress.append)
    received = peer.updates.get(update.manifest.digest)  # the call may end before the peer has seen its first message
    assert received is None or (not received.committed and len(received.chunks) <= 1)


async def test_an_update_is_checked_unless_the_file_is_still_the_one_that_was_written(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    update, file = saved_update(tmp_path)
    mark = mark_of(file)
    status = file.stat()
    damage(file)
    with pytest.raises(IntegrityError, match="chunk 1"):
        await client.coordinator.upload(update, file, mark=mark, progress=client.progress.append)
    peer.updates.clear()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(IntegrityError, match="chunk 1"):  # nobody computed a digest here; the coordinator does
        await client.coordinator.upload(update, file, mark=mark, progress=client.progress.append)
    assert len(peer.updates[update.manifest.digest].chunks) == 1
    assert not peer.updates[update.manifest.digest].committed


async def test_an_update_of_many_chunks_is_read_ahead_in_order(
    peer: FederationPeer, client: Client, tmp_path: Path
) -> None:
    layout = small_bundle(elements=5 << 19).layout
    data = b"".join(bytes([number]) * (1 << 18) for number in range(40))
    file = tmp_path / "update.delta"
    file.write_bytes(data)
    for chunk_bytes in (1 << 18, 3 << 20):  # several chunks are read at a time, or one
        manifest = manifest_of(layout, [data], chunk_bytes)
        update = SavedUpdate(key=KEY, model=Digest("ab" * 32), manifest=manifest, summary=SUMMARY)
        peer.cut_upload_after = 2
        await client.coordinator.upload(update, file, mark=mark_of(file), progress=client.progress.append)
        assert peer.updates[manifest.digest].data == data
        assert peer.updates[manifest.digest].header.first_chunk == 2


@pytest.mark.parametrize("refusal", [WrongTime("round 1 is closed"), MalformedMessage("update holds NaN")])
async def test_what_the_coordinator_says_to_an_update_is_its_word(
    peer: FederationPeer, client: Client, tmp_path: Path, refusal: LoricaError
) -> None:
    update, file = saved_update(tmp_path)
    peer.refuse_upload = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        await client.coordinator.upload(update, file, progress=client.progress.append)


async def test_small_reports_arrive(peer: FederationPeer, client: Client) -> None:
    evaluation = Evaluation(
        split="dev", examples=4, exact_matches=2, executed=3, execution_matches=1, loss_per_token=0.5, seconds=1.0
    )
    coordinator = client.coordinator
    await coordinator.declare_readiness(BUNDLE.plan.digest, ready=False, reason="two\nlines")
    await coordinator.decline(KEY, DeclineReason.DATA, "x" * 1000)
    await coordinator.report_progress(KEY, AgentPhase.TRAINING, 0.5)
    await coordinator.report_evaluation(KEY, Digest("ab" * 32), evaluation)
    assert peer.readiness == [(BUNDLE.plan.digest, False, "two lines")]
    assert peer.declined == [(KEY, DeclineReason.DATA, "x" * 500)]
    assert peer.progress == [(KEY, "training", 0.5)]
    assert peer.evaluations == [(KEY, evaluation)]


def test_waits_double_up_to_a_ceiling_and_start_anew_after_success() -> None:
    backoff = Backoff(first_s=1.0, most_s=4.0)
    for ceiling in (1.0, 2.0, 4.0, 4.0):
        assert ceiling / 10 <= backoff.wait_s() <= ceiling
    backoff.reset()
    assert backoff.wait_s() <= 1.0
