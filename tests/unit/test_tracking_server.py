"""A tracking server that answers as it likes: the tracker comes back, says what is wrong, and sends its credentials
nowhere else."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica.tracking import http_json, mlflow
from lorica.tracking.http_json import HttpJson, server_at
from lorica.tracking.mlflow import Mlflow
from lorica.tracking.point import Point, Run
from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, StateError, Unreachable

TOKEN = "a-token-of-the-test"
POINT = Point(
    run=Run(plan="ab" * 32, name="demo", of="coordinator", federation="north"),
    round=1,
    attempt=1,
    what="round",
    outcome="applied",
    unix_s=1e9,
    values={"seconds": 2.0},
)


@dataclass
class Server:
    """One that answers each connection with what `answer` makes of the request's bytes, and then closes it."""

    answer: Callable[[bytes, socket.socket], None]
    asked: list[bytes] = field(default_factory=list)
    port: int = 0

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(1 << 16)
                self.asked.append(request)
                try:
                    self.answer(request, connection)
                except OSError:
                    continue


@contextmanager
def serving(answer: Callable[[bytes, socket.socket], None]) -> Iterator[Server]:
    server = Server(answer)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.port = listening.getsockname()[1]
        thread = threading.Thread(target=server.serve, args=(listening,), daemon=True)
        thread.start()
        yield server
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def http(status: str, body: bytes, *headers: str) -> Callable[[bytes, socket.socket], None]:
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers))
    return lambda _, connection: connection.sendall(f"{head}\r\n\r\n".encode() + body)


def client(server: Server, tmp_path: Path) -> HttpJson:
    file = tmp_path / "credentials"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return server_at(f"http://127.0.0.1:{server.port}", credentials=file, authorities=None)


def test_a_redirect_is_an_error_and_credentials_go_nowhere_else(tmp_path: Path) -> None:
    with (
        serving(http("200 OK", b"{}")) as other,
        serving(http("307 Temporary Redirect", b"", f"Location: http://127.0.0.1:{other.port}/")) as server,
    ):
        with pytest.raises(StateError, match="307"):
            client(server, tmp_path).post("runs/search", {})
        assert TOKEN.encode() in server.asked[0]
        assert other.asked == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http("200 OK", b"no json"), MalformedMessage),
        (http("200 OK", b"[1, 2]"), MalformedMessage),
        (http("200 OK", b"[" * 100_000), MalformedMessage),
        (http("200 OK", b"\xff\xfe{}"), MalformedMessage),
        (http("500 Oops", b"<html>\x1b[2J" * 100), StateError),
        (lambda _, connection: connection.sendall(b"SSH-2.0-x\r\n"), Unreachable),
        (lambda _, connection: connection.sendall(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500 + b"\r\n{}"), Unreachable),
        (lambda _, connection: None, Unreachable),
        (
            lambda _, connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (http_json.MOST_BYTES + 9)),
            Unreachable,
        ),
    ],
)
def test_an_answer_that_is_none_is_named(
    answer: Callable[[bytes, socket.socket], None], error: type[LoricaError], tmp_path: Path
) -> None:
    with serving(answer) as server, pytest.raises(error) as caught:
        client(server, tmp_path).post("runs/search", {})
    assert str(server.port) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert TOKEN not in repr(caught.value)


@pytest.mark.parametrize(
    "begins",
    [b"", b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"],
)
def test_an_answer_that_comes_byte_by_byte_is_cut_off(
    begins: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes within the connection's own time limit."""
    monkeypatch.setattr(http_json, "LONGEST_S", 0.2)
    came_to_its_end = threading.Event()

    def drip(_: bytes, connection: socket.socket) -> None:
        connection.sendall(begins)
        for _ in range(200):
            threading.Event().wait(0.02)
            connection.sendall(b"x")
        came_to_its_end.set()

    with serving(drip) as server, pytest.raises((Unreachable, MalformedMessage)):
        client(server, tmp_path).post("runs/search", {})
    assert not came_to_its_end.is_set()


ids = st.text(max_size=70) | st.integers() | st.none()
runs = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("runs", "info", "data", "run_id", "tags", "key", "value")), inner, max_size=4
        )
    ),
    max_leaves=12,
)


class Answering(HttpJson):
    """Without a network: each call has the next of `answers`."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        super().__init__(where="http://here", host="127.0.0.1", port=1, path="", secure=False)
        object.__setattr__(self, "answers", answers)
        object.__setattr__(self, "sent", [])

    def _ask(self, method: str, call: str, content: bytes | None) -> Mapping[str, Any]:
        self.sent.append((call, content))  # type: ignore[attr-defined]
        answer = self.answers[call.partition("?")[0]]  # type: ignore[attr-defined]
        return answer if isinstance(answer, dict) else {}


@given(experiment=ids, run=ids, searched=runs)
def test_no_answer_of_mlflows_gets_into_a_request_but_an_id(experiment: object, run: object, searched: object) -> None:
    """Whatever the server says: an error of ours, or a request whose ids are ids."""
    server = Answering(
        {
            "experiments/get-by-name": {"experiment": {"experiment_id": experiment}},
            "runs/search": searched,
            "runs/create": {"run": {"info": {"run_id": run}}},
            "runs/log-batch": {},
        }
    )
    try:
        Mlflow(server, "lorica").take([POINT])
    except LoricaError:
        return
    for _, content in server.sent:  # type: ignore[attr-defined]
        told = json.loads(content) if content else {}
        for name in (told.get("run_id", "x"), *told.get("experiment_ids", ["x"]), told.get("experiment_id", "x")):
            assert isinstance(name, str)
            assert name.replace("-", "").replace("_", "").isalnum()
            assert name.isascii()


def answering(**changed: Mapping[str, Any]) -> Answering:
    return Answering(
        {
            "experiments/get-by-name": {"experiment": {"experiment_id": "7"}},
            "runs/search": {"runs": [{"info": {"run_id": "a1"}, "data": {}}]},
            "runs/log-batch": {},
            **changed,
        }
    )


def test_a_slow_server_gets_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that other tools have their turn in between; in the end it has each point once."""
    monkeypatch.setattr(mlflow, "PATIENCE_S", 0.0)
    server = answering()
    sink = Mlflow(server, "lorica")
    points = [replace(POINT, round=number) for number in range(1, 4)]
    assert [sink.take(points) for _ in range(4)] == [1, 1, 1, 0]
    sent = [json.loads(content) for call, content in server.sent if call == "runs/log-batch"]  # type: ignore[attr-defined]
    assert [each["metrics"][0]["step"] for each in sent] == [1, 2, 3]


def test_a_run_that_was_deleted_there_is_looked_for_anew() -> None:
    class Deleted(Answering):
        def _ask(self, method: str, call: str, content: bytes | None) -> Mapping[str, Any]:
            if call == "runs/log-batch" and b'"gone"' in (content or b""):
                raise StateError("answers with 400: it is deleted")
            return super()._ask(method, call, content)

    server = Deleted(dict(answering().answers))  # type: ignore[attr-defined]
    server.answers["runs/search"] = {"runs": [{"info": {"run_id": "gone"}, "data": {}}]}  # type: ignore[attr-defined]
    sink = Mlflow(server, "lorica")
    with pytest.raises(StateError, match="choose another --experiment"):
        sink.take([POINT])
    server.answers["runs/search"] = {"runs": [{"info": {"run_id": "new"}, "data": {}}]}  # type: ignore[attr-defined]
    assert sink.take([POINT]) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://mlflow.example.org",
        "http://10.0.0.1:5000",
        "http://localhost.example.org",
        "https://name:word@mlflow.example.org",
        "https://mlflow.example.org/?a=b",
        "https://mlflow.example.org:99999",
        "ftp://127.0.0.1",
        "file:///tmp/mlruns",
        "mlflow.example.org",
        "https://",
        "http://[::1",
        "https://a..example.org",
        f"https://{'a' * 64}.example.org",
        "https://mlflow.example.org:0",
        "",
    ],
)
def test_an_address_that_would_show_rounds_or_credentials_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        server_at(url, credentials=None, authorities=None)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:5000", "http://[::1]:5000", "http://localhost", "https://m.example.org/x/"]
)
def test_an_address_that_shows_nothing_is_taken(url: str) -> None:
    assert server_at(url, credentials=None, authorities=None).secure is url.startswith("https")


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nx\n"])
def test_authorities_that_are_none_are_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        server_at("https://m.example.org", credentials=None, authorities=tmp_path / "ca.pem")


def test_credentials_that_others_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(TOKEN)
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        server_at("https://m.example.org", credentials=file, authorities=None)
    file.chmod(0o600)
    server = server_at("https://m.example.org", credentials=file, authorities=None)
    assert TOKEN not in repr(server)
    assert server.authorization == f"Bearer {TOKEN}"
    file.write_text("name:word\nX: y")
    with pytest.raises(ConfigurationError, match="one line"):
        server_at("https://m.example.org", credentials=file, authorities=None)


def test_a_server_is_believed_by_its_certificate_alone(tmp_path: Path) -> None:
    """Over TLS, one that answers in clear, or whose certificate nobody signed, is told nothing."""
    with serving(http("200 OK", b"{}")) as server:
        https = server_at(f"https://127.0.0.1:{server.port}", credentials=None, authorities=None)
        with pytest.raises(Unreachable):
            https.post("runs/search", {"secret": "of rounds"})
        assert b"secret" not in b"".join(server.asked)
