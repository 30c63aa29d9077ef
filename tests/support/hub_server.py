"""A hub as `huggingface_hub` knows it, on loopback: repositories, files in commits, and large files in a storage of
another origin. What it answers to a call can be replaced by what a hostile one would."""

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

TOKEN: Final = "hf_a_token_of_the_test"
COMMIT: Final = "c0ffee" * 6 + "beef"
Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class LoopbackServer:
    """`hostile` answers in place of the server, by the beginning of `METHOD path` that it is for."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.hostile: dict[str, Callable[[Asked], Answer]] = {}
        self.port = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, asked: Asked) -> Answer:
        raise NotImplementedError

    def answered(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        for begins, hostile in self.hostile.items():
            if f"{asked.method} {asked.path}".startswith(begins):
                return hostile(asked)
        return self.answer(asked)


def as_json(value: object, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


class Storage(LoopbackServer):
    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}

    def answer(self, asked: Asked) -> Answer:
        if asked.method != "PUT" or hashlib.sha256(asked.body).hexdigest() != asked.path.removeprefix("/"):
            return 400, {}, b"not what was announced"
        self.objects[asked.path.removeprefix("/")] = asked.body
        return 200, {}, b""


class HubServer(LoopbackServer):
    """Files whose name ends with .safetensors are large ones."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        self.repositories: dict[str, Repository] = {}

    def answer(self, asked: Asked) -> Answer:
        if asked.headers.get("authorization") != f"Bearer {TOKEN}":
            return as_json({"error": "Invalid username or password."}, 401)
        said: Any = {}
        if asked.body and "x-ndjson" not in asked.headers["content-type"]:
            said = json.loads(asked.body)
        match asked.method, [part for part in asked.path.split("/") if part]:
            case "POST", ["api", "repos", "create"]:
                name = f"{said['organization']}/{said['name']}"
                if name in self.repositories:
                    return as_json({"error": "You already created this model repo", "url": self._url(name)}, 409)
                self.repositories[name] = Repository(private=said["visibility"] == "private")
                return as_json({"url": self._url(name), "name": name})
            case "GET", ["api", "models", owner, name]:
                repository = self.repositories[f"{owner}/{name}"]
                return as_json({"id": f"{owner}/{name}", "private": repository.private, "siblings": [], "tags": []})
            case "POST", ["api", "validate-yaml"]:
                return as_json({"errors": [], "warnings": []})
            case "POST", ["api", "models", _, _, "preupload", "main"]:
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in said["files"]
                ]
                return as_json({"files": modes})
            case "POST", [_, _, "info", "lfs", "objects", "batch"]:
                return as_json({"transfer": "basic", "objects": [self._upload(one) for one in said["objects"]]})
            case "POST", ["verify"]:
                return as_json({}, 200 if said["oid"] in self.storage.objects else 404)
            case "POST", ["api", "models", owner, name, "commit", "main"]:
                self._commit(self.repositories[f"{owner}/{name}"], asked.body)
                return as_json({"commitOid": COMMIT, "commitUrl": f"{self._url(f'{owner}/{name}')}/commit/{COMMIT}"})
        return 404, {}, b"no such call"

    def _url(self, name: str) -> str:
        return f"{self.origin}/{name}"

    def _upload(self, one: dict[str, Any]) -> dict[str, Any]:
        return {
            **one,
            "actions": {
                "upload": {"href": f"{self.storage.origin}/{one['oid']}", "header": {}},
                "verify": {"href": f"{self.origin}/verify", "header": {}},
            },
        }

    def _commit(self, repository: Repository, body: bytes) -> None:
        for line in body.splitlines():
            item = json.loads(line)
            match item["key"], item["value"]:
                case "header", value:
                    repository.messages.append(value["summary"])
                case "file", value:
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile", value:
                    repository.files[value["path"]] = self.storage.objects[value["oid"]]


def _handler(server: LoopbackServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one piece: TCP waits between two

        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, said, content = server.answered(Asked(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **said}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = any  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Tests read what was asked elsewhere."""

    return Handler


@contextmanager
def serving(server: LoopbackServer, tls: ssl.SSLContext | None = None) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(server)) as listening:
        listening.daemon_threads = True
        if tls is not None:
            listening.socket = tls.wrap_socket(listening.socket, server_side=True)
        server.port = listening.server_address[1]
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown()
            thread.join()


@contextmanager
def a_hub() -> Iterator[HubServer]:
    storage = Storage()
    hub = HubServer(storage)
    with serving(storage), serving(hub):
        yield hub
