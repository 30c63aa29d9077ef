"""A key in a token as `cryptography` knows keys: it signs there. Ed25519 for identities, ECDSA on P-256 or P-384 for
TLS and authorities.

The public key is read once, and the private one has signed something that it verifies before anybody gets the pair: a
token may hold two keys under one name, or a public key of another private one.
"""

import secrets
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, encode_dss_signature

from lorica_security.errors import ConfigurationError
from lorica_security.pkcs11_keys.token_session import TokenLost, TokenSession, TokenUnusable, session_of
from lorica_security.pkcs11_keys.token_uri import TokenUri

_ED25519 = (
    bytes.fromhex("06032b6570"),
    bytes.fromhex("130c656477617264733235353139"),
    bytes.fromhex("06092b06010401da470f01"),
)
"""EC_PARAMS of PKCS#11 3.0 (the OID of RFC 8410, the curve's name) and of drafts before it."""
_CURVES: dict[bytes, ec.EllipticCurve] = {
    bytes.fromhex("06082a8648ce3d030107"): ec.SECP256R1(),
    bytes.fromhex("06052b81040022"): ec.SECP384R1(),
}
_OCTETS = 4
_CHALLENGE_BYTES = 32


class TokenIdentityKey(Ed25519PrivateKey):
    """Ed25519, in a token."""

    def __init__(
        self, uri: TokenUri, session: TokenSession, private: Any, public: Ed25519PublicKey, *, may_leave: bool
    ) -> None:
        """`may_leave`: the token gives the key to whoever has the PIN and asks for it."""
        self.uri, self.may_leave = uri, may_leave
        self._session, self._private, self._public = session, private, public

    def public_key(self) -> Ed25519PublicKey:
        return self._public

    def sign(self, data: Any) -> bytes:
        """Raises TokenLost."""
        import pkcs11

        with self._session.turn():
            return bytes(self._private.sign(bytes(data), mechanism=pkcs11.Mechanism.EDDSA))

    def private_bytes(self, *_: Any, **__: Any) -> NoReturn:
        _stays()

    def private_bytes_raw(self) -> NoReturn:
        _stays()

    def __copy__(self) -> "TokenIdentityKey":
        return self

    def __deepcopy__(self, memo: Any) -> "TokenIdentityKey":
        return self

    def __reduce__(self) -> NoReturn:
        _stays()


class TokenTlsKey(ec.EllipticCurvePrivateKey):
    """ECDSA, in a token."""

    def __init__(
        self, uri: TokenUri, session: TokenSession, private: Any, public: ec.EllipticCurvePublicKey, *, may_leave: bool
    ) -> None:
        """As above."""
        self.uri, self.may_leave = uri, may_leave
        self._session, self._private, self._public = session, private, public

    def public_key(self) -> ec.EllipticCurvePublicKey:
        return self._public

    @property
    def curve(self) -> ec.EllipticCurve:
        return self._public.curve

    @property
    def key_size(self) -> int:
        return self._public.key_size

    def sign(self, data: Any, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        """As DER; raises TokenLost. The digest is made here, and the token signs it."""
        import pkcs11

        algorithm = signature_algorithm.algorithm
        if isinstance(algorithm, Prehashed):
            digest = bytes(data)
        else:
            hashing = hashes.Hash(algorithm)
            hashing.update(data)
            digest = hashing.finalize()
        size = (self.key_size + 7) // 8
        with self._session.turn():  # FIPS 186-5: of a longer digest the leftmost bits count
            signature = bytes(self._private.sign(digest[:size], mechanism=pkcs11.Mechanism.ECDSA))
        if len(signature) != 2 * size:
            raise TokenLost(
                f"the token {self.uri.of_token} gave a signature of {len(signature)} bytes: look at its log"
            )
        return encode_dss_signature(int.from_bytes(signature[:size]), int.from_bytes(signature[size:]))

    def exchange(self, *_: Any, **__: Any) -> NoReturn:
        _stays()

    def private_numbers(self) -> NoReturn:
        _stays()

    def private_bytes(self, *_: Any, **__: Any) -> NoReturn:
        _stays()

    def __copy__(self) -> "TokenTlsKey":
        return self

    def __deepcopy__(self, memo: Any) -> "TokenTlsKey":
        return self

    def __reduce__(self) -> NoReturn:
        _stays()


TokenKey = TokenIdentityKey | TokenTlsKey


def _stays() -> NoReturn:
    raise ConfigurationError(
        "this key lies in a token, which does not give it away: back the token up by its own means"
    )


def token_key(uri: TokenUri) -> TokenKey:
    """The key that `uri` names, after it has signed a challenge; by its kind.

    Raises TokenUnusable for a library, token or key that is not there, is there twice, or is of no kind that is
    used here; WrongPin.
    """
    session = session_of(uri)
    import pkcs11

    with session.turn() as opened:
        private = _one(uri, opened, pkcs11.ObjectClass.PRIVATE_KEY, "private")
        public = _one(uri, opened, pkcs11.ObjectClass.PUBLIC_KEY, "public")
        kind = public[pkcs11.Attribute.KEY_TYPE]
        kinds = {kind, private[pkcs11.Attribute.KEY_TYPE]}
        if not kinds <= {pkcs11.KeyType.EC, pkcs11.KeyType.EC_EDWARDS}:
            raise _wrong_kind(uri, ", ".join(sorted(one.name for one in kinds)))
        parameters, point = bytes(public[pkcs11.Attribute.EC_PARAMS]), bytes(public[pkcs11.Attribute.EC_POINT])
        may_leave = bool(private[pkcs11.Attribute.EXTRACTABLE])
    key = _paired(uri, session, private, parameters, _unwrapped(point), may_leave=may_leave)
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    try:
        if isinstance(key, TokenIdentityKey):
            key.public_key().verify(key.sign(challenge), challenge)
        else:
            algorithm = ec.ECDSA(hashes.SHA256())
            key.public_key().verify(key.sign(challenge, algorithm), challenge, algorithm)
    except InvalidSignature:
        raise TokenUnusable(
            f"the private key {uri.of_key} of token {uri.of_token} does not belong to the public key of that name: "
            "delete the one that is wrong, or give both an id and name that"
        ) from None
    return key


def _paired(
    uri: TokenUri, session: TokenSession, private: Any, parameters: bytes, point: bytes, *, may_leave: bool
) -> TokenKey:
    try:
        if parameters in _ED25519:
            own = Ed25519PublicKey.from_public_bytes(point)
            return TokenIdentityKey(uri, session, private, own, may_leave=may_leave)
        if parameters in _CURVES:
            public = ec.EllipticCurvePublicKey.from_encoded_point(_CURVES[parameters], point)
            return TokenTlsKey(uri, session, private, public, may_leave=may_leave)
    except ValueError as error:
        raise TokenUnusable(f"the public key {uri.of_key} of token {uri.of_token} is none: {error}") from error
    raise _wrong_kind(uri, f"a curve with parameters {parameters.hex()}")


def _wrong_kind(uri: TokenUri, kind: str) -> TokenUnusable:
    return TokenUnusable(
        f"the key {uri.of_key} of token {uri.of_token} is of kind {kind}: use Ed25519 for an identity, ECDSA on "
        "P-256 or P-384 for TLS and authorities"
    )


def _one(uri: TokenUri, opened: Any, of_class: Any, word: str) -> Any:
    import pkcs11

    named: dict[Any, Any] = {pkcs11.Attribute.CLASS: of_class}
    if uri.object:
        named[pkcs11.Attribute.LABEL] = uri.object
    if uri.id:
        named[pkcs11.Attribute.ID] = uri.id
    found = list(opened.get_objects(named))
    if len(found) == 1:
        return found[0]
    if found:
        raise TokenUnusable(
            f"token {uri.of_token} has {len(found)} {word} keys {uri.of_key}: give the URI an id= that only one has"
        )
    raise TokenUnusable(
        f"token {uri.of_token} has no {word} key {uri.of_key}: make the pair there, both halves under one label and id "
        "(pkcs11-tool --keypairgen)"
    )


def _unwrapped(point: bytes) -> bytes:
    """EC_POINT is a DER OCTET STRING; some tokens leave that out."""
    if len(point) > 2 and point[0] == _OCTETS and point[1] == len(point) - 2:
        return point[2:]
    return point
