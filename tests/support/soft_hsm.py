"""A PKCS#11 library with tokens of its own: SoftHSM2, whose tokens are folders. One set of them for each process of
tests, made before the library is used there: it reads where they are, and which there are, once.

Keys are made by another process, as an operator's would be made by pkcs11-tool: a session of this one is then the
product's alone.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

LIBRARY = Path("/usr/lib/softhsm/libsofthsm2.so")
CAN = LIBRARY.exists() and shutil.which("softhsm2-util") is not None and find_spec("pkcs11") is not None
WHY_NOT = "SoftHSM2 (Debian's softhsm2) or python-pkcs11 is not here"
PIN = "correct-horse-7351"
SO_PIN = "staple-9162-battery"

Key = tuple[str, str, str, str]
"""Token, label, id in hex, kind; one "without public" lacks that half, "gone" takes both away."""
KEYS: tuple[Key, ...] = (
    ("silo", "identity", "01", "ed25519"),
    ("silo", "tls", "02", "secp256r1"),
    ("silo", "tls-384", "03", "secp384r1"),
    ("odd", "large", "04", "secp521r1"),
    ("odd", "rsa", "05", "rsa"),
    ("odd", "twice", "06", "ed25519"),
    ("odd", "twice", "07", "ed25519"),
    ("odd", "halves", "08", "ed25519 without public"),
    ("odd", "swapped", "09", "ed25519 without public"),
    ("odd", "swapped", "0a", "ed25519 without private"),
    ("going", "identity", "01", "ed25519"),
    ("closing", "tls", "01", "secp256r1"),
    ("losing", "tls", "01", "secp256r1"),
    ("authority", "ca", "01", "secp256r1"),
    ("authority", "ca-2", "02", "secp384r1"),
    ("hospital", "identity", "01", "ed25519"),
    ("hospital", "tls", "02", "secp256r1"),
)
TOKENS = (*dict.fromkeys(token for token, *_ in KEYS), "wrong", "unopened")


@cache
def tokens() -> Path:
    """Where those of this process are; the library finds them by the environment, here and in processes that are
    started."""
    root = Path(tempfile.mkdtemp(prefix="lorica-softhsm-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "tokens").mkdir()
    (root / "softhsm2.conf").write_text(
        f"directories.tokendir = {root / 'tokens'}\nobjectstore.backend = file\nlog.level = ERROR\n"
    )
    os.environ["SOFTHSM2_CONF"] = str(root / "softhsm2.conf")
    for label in TOKENS:
        words = ("--init-token", "--free", "--label", label, "--so-pin", SO_PIN, "--pin", PIN)
        subprocess.run(["softhsm2-util", *words], check=True, capture_output=True)
    make_keys(*KEYS)
    return root


def make_keys(*keys: Key) -> None:
    subprocess.run([sys.executable, __file__, json.dumps(keys)], check=True)


def pin_file(place: Path, pin: str = PIN) -> Path:
    place.touch(mode=0o600)
    place.write_text(pin + "\n")
    return place


def uri(token: str, key: str, pin: Path, *more: str) -> str:
    return (
        f"pkcs11:{';'.join((f'token={token}', f'object={quote(key)}', *more))}?module-path={LIBRARY}&pin-source={pin}"
    )


def _made(keys: Sequence[Key]) -> None:
    import pkcs11
    from pkcs11 import Attribute, KeyType, Mechanism, ObjectClass
    from pkcs11.util.ec import encode_named_curve_parameters

    library = pkcs11.lib(str(LIBRARY))
    for token, label, number, kind in keys:
        with library.get_token(token_label=token).open(user_pin=PIN, rw=True) as session:
            named = {"store": True, "label": label, "id": bytes.fromhex(number)}
            curve, _, lacks = kind.partition(" without ")
            if curve == "gone":
                for one in session.get_objects({Attribute.LABEL: label}):
                    one.destroy()
                continue
            if curve == "rsa":
                session.generate_keypair(KeyType.RSA, 2048, **named)
                continue
            edwards = curve == "ed25519"
            parameters = encode_named_curve_parameters("1.3.101.112" if edwards else curve)
            domain = session.create_domain_parameters(
                KeyType.EC_EDWARDS if edwards else KeyType.EC, {Attribute.EC_PARAMS: parameters}, local=True
            )
            made_by = {"mechanism": Mechanism.EC_EDWARDS_KEY_PAIR_GEN} if edwards else {}
            domain.generate_keypair(**named, **made_by)
            if lacks:
                of_class = ObjectClass.PUBLIC_KEY if lacks == "public" else ObjectClass.PRIVATE_KEY
                for one in session.get_objects({Attribute.ID: named["id"], Attribute.CLASS: of_class}):
                    one.destroy()


if __name__ == "__main__":
    _made([tuple(one) for one in json.loads(sys.argv[1])])
