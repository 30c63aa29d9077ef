"""`coordinator export --push`: an exported model in a repository of a hub, and a token that goes there alone."""

import itertools
import json
import socketserver
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.operator_host import hub as hub_module
from lorica_coordinator.edges.operator_host.hub import Hub, hub_of, push
from lorica_security.errors import (
    AuthenticationError,
    ConfigurationError,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    StateError,
    Unreachable,
)
from lorica_security.on_disk.provenance import PROVENANCE_FILE
from tests.support.hub_server import COMMIT, TOKEN, Answer, Asked, HubServer, LoopbackServer, a_hub, as_json, serving

NAME = "clinics/north"
MESSAGE = "Model 0123 of plan first"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported")
    for name, content in {
        "README.md": b"---\nlibrary_name: transformers\n---\n\n# first\n",
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 400,
        PROVENANCE_FILE: b"{}\n",
    }.items():
        (made / name).write_bytes(content)
    return made


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with a_hub() as served:
        yield served


def at(hub: HubServer, *, public: bool = False, token: str = TOKEN) -> Hub:
    return hub_of(NAME, token_file=None, public=public, environment={"HF_ENDPOINT": hub.origin, "HF_TOKEN": token})


def test_a_model_is_in_the_repository_whole_as_one_commit(hub: HubServer, folder: Path) -> None:
    assert push(folder, at(hub), message=MESSAGE) == COMMIT
    repository = hub.repositories[NAME]
    assert repository.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert repository.messages == [MESSAGE]
    assert repository.private
    assert list(hub.storage.objects.values()) == [(folder / "model.safetensors").read_bytes()]
    assert push(folder, at(hub), message="again") == COMMIT
    assert repository.messages == [MESSAGE, "again"]


def test_the_token_goes_to_the_hub_alone(hub: HubServer, folder: Path) -> None:
    push(folder, at(hub), message=MESSAGE)
    assert {asked.headers.get("authorization") for asked in hub.asked} == {f"Bearer {TOKEN}"}
    (stored,) = hub.storage.asked
    assert TOKEN not in repr(stored)
    assert TOKEN not in repr(at(hub))


def test_a_repository_that_everybody_reads_is_asked_for(hub: HubServer, folder: Path) -> None:
    push(folder, at(hub, public=True), message=MESSAGE)
    assert not hub.repositories[NAME].private
    with pytest.raises(ConfigurationError, match="say --public"):
        push(folder, at(hub), message="by accident")
    assert hub.repositories[NAME].messages == [MESSAGE]
    assert len(hub.storage.asked) == 1


@pytest.mark.parametrize("which", ["upload", "verify"])
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer x"}, {"chunk_size": "1000", "1": "http://"}])
def test_attack_a_hub_that_has_the_token_sent_elsewhere(
    hub: HubServer, folder: Path, which: str, header: dict[str, str]
) -> None:
    """Where large files go, and where they are checked, the hub says."""
    other = LoopbackServer()
    with serving(other):

        def elsewhere(asked: Asked) -> Answer:
            (one,) = json.loads(asked.body)["objects"]
            actions = {
                "upload": {"href": f"{hub.storage.origin}/{one['oid']}", "header": {}},
                "verify": {"href": f"{hub.origin}/verify", "header": {}},
            }
            actions[which] = {"href": f"{other.origin}/x?token={TOKEN}", "header": header}
            return as_json({"transfer": "basic", "objects": [{**one, "actions": actions}]})

        hub.hostile[f"POST /{NAME}.git"] = elsewhere
        with pytest.raises((MalformedMessage, Unreachable)):
            push(folder, at(hub), message=MESSAGE)
    assert other.asked == []
    assert hub.repositories[NAME].messages == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_attack_a_redirect_is_not_followed(hub: HubServer, folder: Path, status: int) -> None:
    other = LoopbackServer()
    with serving(other):
        for begins in ("POST /api/repos", "GET /api/models", f"POST /api/models/{NAME}/commit"):
            hub.hostile = {begins: lambda _: (status, {"Location": f"{other.origin}/api"}, b"")}
            with pytest.raises((StateError, MalformedMessage, Unreachable)):
                push(folder, at(hub), message=MESSAGE)
    assert other.asked == []


def test_attack_the_model_in_clear_to_another_host(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "is_loopback", lambda host: host == "127.0.0.1" and next(first))
    first = itertools.chain([True], itertools.repeat(False))  # the hub's own address, and then none
    with pytest.raises(MalformedMessage, match="in clear"):
        push(folder, at(hub), message=MESSAGE)
    assert hub.storage.asked == []


def test_attack_answers_without_end(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_ANSWER_BYTES", 10_000)
    hub.hostile = {"POST /api/repos": lambda _: (200, {}, b"a" * 10_001)}
    with pytest.raises(MalformedMessage, match="more than 10000 bytes"):
        push(folder, at(hub), message=MESSAGE)
    hub.hostile = {"POST /api/repos": lambda _: (200, {"Content-Encoding": "gzip"}, b"a")}
    with pytest.raises(MalformedMessage, match="compresses"):
        push(folder, at(hub), message=MESSAGE)
    monkeypatch.setattr(hub_module, "MOST_REQUESTS", 9)
    busy = "Cannot create repo: another conflicting operation is in progress"
    hub.hostile = {"POST /api/repos": lambda _: as_json({"error": busy}, 409)}
    with pytest.raises(StateError, match="in 9 requests"):
        push(folder, at(hub), message=MESSAGE)


class Dripping(socketserver.BaseRequestHandler):
    """Says one byte after the other, without end; or nothing, and reads nothing."""

    says = b""

    def handle(self) -> None:
        with suppress(OSError):
            self.request.sendall(self.says)
            while not self.server.over.wait(0.02):  # type: ignore[attr-defined]
                self.request.sendall(b"a" if self.says else b"")


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 200 OK\r\nX-Word: ", b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n", b""]
)
@pytest.mark.parametrize("where", ["the hub", "the storage"])
def test_attack_a_hub_that_drips(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, says: bytes, where: str
) -> None:
    """Each piece is in time, and the last one never comes."""
    monkeypatch.setattr(hub_module, "PUSH_S", 0.5)
    handler = type("Handler", (Dripping,), {"says": says})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as dripping:
        dripping.daemon_threads = True
        dripping.over = over = threading.Event()  # type: ignore[attr-defined]
        late = threading.Timer(10, over.set)  # else a push that is not ended would not come back
        late.start()
        threading.Thread(target=dripping.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        origin = f"http://127.0.0.1:{dripping.server_address[1]}"
        if where == "the storage":
            monkeypatch.setattr(hub.storage, "port", dripping.server_address[1])
        to = at(hub) if where == "the storage" else replace(at(hub), endpoint=origin)
        try:
            with pytest.raises(Unreachable, match=r"did not take the model within 2 s.*try again") as raised:
                push(folder, to, message=MESSAGE)
            assert not over.is_set()
        finally:
            late.cancel()
            over.set()
            dripping.shutdown()
    assert TOKEN not in str(raised.value)


def test_attack_a_hub_that_has_the_library_sleep(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    said = {"Retry-After": "1000000", "RateLimit": '"api";r=0;t=1000000'}
    hub.storage.hostile = {"PUT": lambda _: (429, said, b"")}
    with pytest.raises(Unreachable):
        push(folder, at(hub), message=MESSAGE)
    assert slept
    assert max(slept) < 60


NOT_A_HUB = st.sampled_from(
    [b"", b"{", b"[]", b"null", b"1", b"{}", b'{"files": 3}', b"[" * 5000, b"\xff"]
) | st.binary(max_size=50)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    call=st.sampled_from(
        [
            "POST /api/repos",
            "GET /api/models",
            "POST /api/validate",
            f"POST /api/models/{NAME}/pre",
            f"POST /{NAME}.git",
            f"POST /api/models/{NAME}/commit",
        ]
    ),
    status=st.sampled_from([200, 400, 401, 403, 404, 409, 413, 422]),
    body=NOT_A_HUB,
)
def test_attack_answers_of_no_hub(hub: HubServer, folder: Path, call: str, status: int, body: bytes) -> None:
    """Whatever is answered: an error of ours in one line, that does not show the token; or the model is there."""
    hub.repositories.clear()
    hub.hostile = {call: lambda _: (status, {"X-Error-Message": f"{TOKEN}\x9b2J"}, body)}
    said = ""
    try:
        push(folder, at(hub), message=MESSAGE)
    except LoricaError as error:
        said = "".join(traceback.format_exception(error)).replace(f"{MESSAGE}\n", "")
        told = str(error)
    else:
        told = "pushed" if hub.repositories[NAME].messages else "lost"
    assert told != "lost"
    assert told.isprintable()
    assert TOKEN not in said


def test_a_token_that_may_not_write_is_named(hub: HubServer, folder: Path) -> None:
    with pytest.raises(AuthenticationError, match="may write the repository"):
        push(folder, at(hub, token="hf_another"), message=MESSAGE)


def test_a_hub_that_is_not_there_is_named(hub: HubServer, folder: Path) -> None:
    away = Hub(endpoint="http://127.0.0.1:9", repository=NAME, token=TOKEN, public=False)
    with pytest.raises(Unreachable, match="does not answer"):
        push(folder, away, message=MESSAGE)


def test_nothing_is_asked_of_a_hub_offline(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        push(folder, at(hub), message=MESSAGE)
    assert hub.asked == []


def test_the_library_is_as_it_was_afterwards(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    push(folder, at(hub), message=MESSAGE)
    assert constants.HF_HUB_DISABLE_XET is False
    moved: Answer = (307, {"Location": "/api/models/clinics/north"}, b"")
    hub.hostile = {"GET /api/models/clinics/south": lambda _: moved}
    assert HfApi(endpoint=hub.origin, token=TOKEN).model_info("clinics/south").id == NAME


def test_a_link_in_the_folder_is_not_followed(hub: HubServer, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("a key")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "key.pem")
    with pytest.raises(IntegrityError, match="no plain file"):
        push(tmp_path / "model", at(hub), message=MESSAGE)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("repository", "environment", "why"),
    [
        ("north", {"HF_TOKEN": TOKEN}, "OWNER/NAME"),
        ("a/../b", {"HF_TOKEN": TOKEN}, "OWNER/NAME"),
        ("a/b\n", {"HF_TOKEN": TOKEN}, "OWNER/NAME"),
        ("datasets/a/b", {"HF_TOKEN": TOKEN}, "OWNER/NAME"),
        (NAME, {}, "HF_TOKEN holds no token"),
        (NAME, {"HF_TOKEN": "two words"}, "one word of ASCII"),
        (NAME, {"HF_TOKEN": "a\r\nHost: b"}, "one word of ASCII"),
        (NAME, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://hub.example.org"}, "in clear"),
        (NAME, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1.example.org"}, "in clear"),
        (NAME, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "ftp://127.0.0.1"}, "no address"),
        (NAME, {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "https://a:b@hub.example.org"}, "alone"),
    ],
)
def test_what_is_wrong_with_a_push_is_told_first(repository: str, environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as raised:
        hub_of(repository, token_file=None, public=False, environment=environment)
    assert TOKEN not in str(raised.value)


def test_a_token_comes_from_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="others can read"):
        hub_of(NAME, token_file=file, public=False, environment={})
    file.chmod(0o600)
    found = hub_of(NAME, token_file=file, public=False, environment={"HF_TOKEN": "hf_of_the_environment"})
    assert (found.token, found.endpoint) == (TOKEN, "https://huggingface.co")
