"""A file that its owner alone can have written: the content, then a line with the owner's signature under it.

Whoever can write the folder and has not the identity key (it can be kept under a passphrase) can delete such a file or
put an old one back, and cannot say anything else in it.
"""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import IntegrityError
from lorica_security.identity.identity_key import SIGNATURE_BYTES, sign, verify

_DOMAIN = b"own-file"
_LINE = b"\nseal "
_END = b"\n"
_BYTES = len(_LINE) + 2 * SIGNATURE_BYTES + len(_END)


class Seal:
    """Of the files of one owner, told apart by `name`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_key(self) -> Ed25519PublicKey:
        """Of the owner."""
        return self._key.public_key()

    def sealed(self, name: str, content: bytes) -> bytes:
        signature = sign(self._key, domain=_DOMAIN, payload=_payload(name, content))
        return content + _LINE + signature.hex().encode() + _END

    def opened(self, name: str, raw: bytes) -> bytes:
        """The content; raises IntegrityError unless the owner sealed it under this name."""
        content, signature = _split(raw)
        if signature is None:
            raise IntegrityError(f"{name} has no seal of this silo's: it was edited, or an earlier release wrote it")
        try:
            verify(self._key.public_key(), domain=_DOMAIN, payload=_payload(name, content), signature=signature)
        except IntegrityError:
            raise IntegrityError(
                f"the seal of {name} is not of what it says, or of another identity key: it was edited"
            ) from None
        return content


def unsealed(raw: bytes) -> bytes:
    """The content, whoever wrote it, and whether or not there is a seal: for people who decide about it."""
    return _split(raw)[0]


def _split(raw: bytes) -> tuple[bytes, bytes | None]:
    content, line = raw[:-_BYTES], raw[-_BYTES:]
    if not (len(line) == _BYTES and line.startswith(_LINE) and line.endswith(_END)):
        return raw, None
    try:
        return content, bytes.fromhex(line[len(_LINE) : -len(_END)].decode("ascii"))
    except ValueError:
        return raw, None


def _payload(name: str, content: bytes) -> bytes:
    return name.encode() + b"\0" + content
