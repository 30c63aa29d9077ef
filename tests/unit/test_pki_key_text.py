import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import FederationName, Identity, Role
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.key_text import key_from_text, key_text
from tests.support.certificates import BANK, HOSPITAL, OTHER_FEDERATION

KEY = Ed25519PublicKey.from_public_bytes(
    bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
)
"""One that does not change: a check of two bytes misses one mistake in 65536, and none of those below."""
TEXT = key_text(HOSPITAL, KEY)


def test_a_key_is_written_in_groups_that_can_be_read_out() -> None:
    groups = TEXT.split("-")
    assert [len(group) for group in groups] == [4] * 17
    assert "".join(groups[:16]) == public_key_bytes(KEY).hex()


@given(st.binary(min_size=32, max_size=32).filter(lambda raw: any(raw[1:31])))
def test_what_is_written_is_read(raw: bytes) -> None:
    key = Ed25519PublicKey.from_public_bytes(raw)
    assert key_from_text(BANK, key_text(BANK, key)) == key


@pytest.mark.parametrize("form", [str.upper, lambda it: it.replace("-", ""), lambda it: f" {it.replace('-', ' ')}\n"])
def test_capitals_and_grouping_do_not_matter(form: object) -> None:
    assert callable(form)
    assert key_from_text(HOSPITAL, form(TEXT)) == KEY


def test_any_one_mistyped_digit_and_any_two_groups_in_wrong_order_are_noticed() -> None:
    groups = TEXT.split("-")
    swapped = ["-".join([*groups[:i], groups[i + 1], groups[i], *groups[i + 2 :]]) for i in range(len(groups) - 1)]
    mistyped = [
        TEXT[:place] + digit + TEXT[place + 1 :]
        for place, right in enumerate(TEXT)
        for digit in "0123456789abcdef"
        if right not in ("-", digit)
    ]
    assert (len(swapped), len(mistyped)) == (16, 68 * 15)
    for text in (*swapped, *mistyped):
        with pytest.raises(ConfigurationError, match="mistyped"):
            key_from_text(HOSPITAL, text)


@pytest.mark.parametrize("identity", [BANK, Identity(OTHER_FEDERATION, Role.SILO, HOSPITAL.name)])
def test_attack_one_silos_key_passed_off_under_another_name_or_federation_is_noticed(identity: Identity) -> None:
    with pytest.raises(ConfigurationError, match="another silo's"):
        key_from_text(identity, TEXT)


@pytest.mark.parametrize("text", ["", "hello", TEXT[:-1], TEXT + "0", "g" + TEXT[1:], TEXT.replace("-", ":"), "٣" * 68])
def test_what_is_no_key_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"17 groups of 4 .*`silo-agent trust own`"):
        key_from_text(HOSPITAL, text)


def test_a_key_of_small_order_is_refused() -> None:
    neutral = Ed25519PublicKey.from_public_bytes((1).to_bytes(32, "little"))
    with pytest.raises(ConfigurationError, match="small order"):
        key_from_text(HOSPITAL, key_text(HOSPITAL, neutral))


def test_the_documented_keys_are_keys() -> None:
    page = (Path(__file__).parents[2] / "ops" / "docs" / "silo.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"([a-z-]+) ((?:[0-9a-f]{4}-){16}[0-9a-f]{4})", page))
    assert {name for name, _ in documented} == {"hospital-a", "bank-b"}
    for name, text in documented:
        key_from_text(Identity(FederationName("north"), Role.SILO, name), text)
