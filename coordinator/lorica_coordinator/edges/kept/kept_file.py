"""How a kept file lies in a bucket: blocks named by what they hold, and an index that is put last and signed.

    tTERM/PATH/NUMBER-DIGEST    16 MiB of the file, the last one fewer; NUMBER counts from 0, in six digits; BLAKE3
    tTERM/PATH/index            canonical JSON of `KeptFile`, with a signature of the coordinator's identity key

TERM is that of the leader who kept it, in ten digits; PATH is the file's below the state folder. What is in a bucket
was chosen by whoever writes it: an index counts only with the coordinator's signature over this federation, path and
term, and a block only with the digest that the index has. Which files there are at all is said by KINDS.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import IntegrityError
from lorica_security.identity import identity_key
from silo_wire.canonical import canonical_json

BLOCK_BYTES: Final = 16 << 20
"""At most, and of what is put."""
DOMAIN: Final = "kept-file"
MOST_BLOCKS: Final = 1 << 16
"""1 TiB."""
MOST_INDEX_BYTES: Final = MOST_BLOCKS * 72 + 4096
INDEX: Final = "index"
AFTER_ALL_TERMS: Final = 10**10
"""The least that a name has no digits for."""
_DIGEST: Final = "[0-9a-f]{64}"
_NAME: Final = "[a-z0-9][a-z0-9_-]{0,62}"


def _paths(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("DIGEST", _DIGEST).replace("NAME", _NAME))


_UPDATE: Final = _paths(r"spools/DIGEST/[0-9]{1,9}-[0-9]{1,9}/NAME\.delta")
KINDS: Final = tuple(
    _paths(pattern)
    for pattern in (
        r"bundles/DIGEST\.bundle",
        r"models/DIGEST/(?:base/)?(?:initial\.json|DIGEST\.manifest\.json|DIGEST\.safetensors)",
        r"models/DIGEST/(?:base/)?DIGEST\.optimizer/(?:state\.json|[A-Za-z][A-Za-z0-9_.-]{0,62}\.f32)",
        r"models/DIGEST/evidence/DIGEST\.(?:evidence|verdicts|json)",
        r"spools/DIGEST/[0-9]{1,9}-[0-9]{1,9}/NAME\.(?:delta|json)",
    )
)
"""Of paths below the state folder, those that are kept."""
_OBJECT: Final = re.compile(r"t([0-9]{10})/(.{1,400})/(index|[0-9]{6}-[0-9a-f]{64})")


def is_kept_kind(path: str) -> bool:
    """Whether a file at this path below the state folder is one of those that are kept; no other is brought."""
    return any(kind.fullmatch(path) for kind in KINDS)


def is_encrypted(path: str) -> bool:
    """Whether that file is encrypted where it lies: an update, with a key that never comes to a bucket."""
    return _UPDATE.fullmatch(path) is not None


@dataclass(frozen=True, slots=True)
class ObjectName:
    """`part` is INDEX, or of a block."""

    term: int
    path: str
    part: str

    def __str__(self) -> str:
        return f"t{self.term:010}/{self.path}/{self.part}"

    @classmethod
    def parse(cls, name: str) -> "ObjectName | None":
        """None for what is no object of a kept file."""
        match = _OBJECT.fullmatch(name)
        if match is None or not is_kept_kind(match[2]):
            return None
        return cls(int(match[1]), match[2], match[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """What an index says: a file of `size` bytes, in blocks of `block_bytes` with these BLAKE3 digests
    (hexadecimal)."""

    federation: str
    path: str
    term: int
    size: int
    block_bytes: int
    blocks: tuple[str, ...]

    def block(self, number: int) -> str:
        """The name of its object."""
        return str(ObjectName(self.term, self.path, f"{number:06}-{self.blocks[number]}"))

    @property
    def index(self) -> str:
        return str(ObjectName(self.term, self.path, INDEX))

    def size_of(self, number: int) -> int:
        """Bytes of block `number`."""
        return min(self.block_bytes, self.size - number * self.block_bytes)

    @property
    def _fields(self) -> dict[str, object]:
        return {
            "block_bytes": self.block_bytes,
            "blocks": list(self.blocks),
            "federation": self.federation,
            "path": self.path,
            "size": self.size,
            "term": self.term,
        }

    def to_bytes(self, sign: Callable[[str, bytes], bytes]) -> bytes:
        """`sign`: by domain and statement, with the coordinator's identity key."""
        signature = sign(DOMAIN, canonical_json(self._fields))
        return canonical_json({"file": self._fields, "signature": signature.hex()})

    @classmethod
    def parse(
        cls, raw: bytes | memoryview, key: Ed25519PublicKey, *, federation: str, path: str, term: int, where: str
    ) -> "KeptFile":
        """Raises IntegrityError naming `where` for what was not signed for this place."""
        try:
            value: Any = json.loads(bytes(raw))
            fields, signature = value["file"], bytes.fromhex(value["signature"])
            kept = cls(
                federation=_text(fields["federation"]),
                path=_text(fields["path"]),
                term=_number(fields["term"]),
                size=_number(fields["size"]),
                block_bytes=_number(fields["block_bytes"]),
                blocks=tuple(_block_digest(one) for one in fields["blocks"]),
            )
            statement = canonical_json(kept._fields)
            if not 0 < kept.block_bytes <= BLOCK_BYTES or len(kept.blocks) != -(-kept.size // kept.block_bytes):
                raise ValueError("blocks and size do not fit")
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
            raise IntegrityError(f"{where} is no index of a kept file: {_REMEDY}") from error
        try:
            identity_key.verify(key, domain=DOMAIN.encode(), payload=statement, signature=signature)
        except IntegrityError:
            raise IntegrityError(
                f"{where} was not signed by this coordinator's identity key: somebody else wrote it; {_REMEDY}"
            ) from None
        if (kept.federation, kept.path, kept.term) != (federation, path, term):
            raise IntegrityError(f"{where} is the index of another file ({kept.path}, term {kept.term}): {_REMEDY}")
        return kept

    def check(self, number: int, content: bytes | memoryview, where: str) -> None:
        """Raises IntegrityError naming `where` unless `content` is block `number`."""
        if len(content) != self.size_of(number) or digest_of_block(content) != self.blocks[number]:
            raise IntegrityError(f"{where} is not what was kept: {_REMEDY}")


_REMEDY: Final = "restore that object from the bucket's versions, or delete what is below its path to go on without it"


def digest_of_block(content: bytes | memoryview) -> str:
    return blake3(content).hexdigest()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise TypeError("not a number")
    return value


def _block_digest(value: object) -> str:
    text = _text(value)
    if re.fullmatch(_DIGEST, text) is None:
        raise ValueError("not a digest")
    return text
