"""`pkcs11:` URIs: what they name, what they may not have in them, and that no error shows what somebody wrote."""

from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError
from lorica_security.pkcs11_keys.token_uri import MOST_CHARACTERS, TokenUri

SECRET = "1739-secret"
QUERY = "?module-path=/usr/lib/x.so&pin-source=/etc/pin"
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


@given(
    token=words,
    label=words,
    number=st.binary(min_size=1, max_size=8),
    module=words,
    pin=words.filter(lambda text: text[0] != "/"),
)
def test_what_is_named_is_read(token: str, label: str, number: bytes, module: str, pin: str) -> None:
    path = f"token={quote(token, safe='')};object={quote(label, safe='')};id={quote_from_bytes(number, safe='')}"
    text = f"pkcs11:{path}?module-path=/{quote(module, safe='')}&pin-source=file:/{quote(pin, safe='')}"
    uri = TokenUri.parse(text)
    assert (uri.token, uri.object, uri.id, uri.module) == (token, label, number, f"/{module}")
    assert uri.pin_source == f"/{pin}"
    assert uri.text == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "that is no pkcs11: URI"),
        ("token=a;object=b" + QUERY, "that is no pkcs11: URI"),
        ("PKCS11:token=a;object=b" + QUERY, "that is no pkcs11: URI"),
        ("pkcs11:token=a;object=b c" + QUERY, "that is no pkcs11: URI"),
        ("pkcs11:token=a;object=b\n" + QUERY, "that is no pkcs11: URI"),
        ("pkcs11:token=a;object=" + "b" * MOST_CHARACTERS + QUERY, "that is no pkcs11: URI"),
        ("pkcs11:object=b" + QUERY, "names no token: give token="),
        ("pkcs11:token=a" + QUERY, "names no key: give object="),
        ("pkcs11:token=a;token=b;object=c" + QUERY, "has token twice"),
        ("pkcs11:token=a;object=b;type=public" + QUERY, "names no private key"),
        ("pkcs11:token=a;object=b;slot-id=3" + QUERY, "has a part that is none of token, serial"),
        ("pkcs11:token=a;object=b%f" + QUERY, "without two hexadecimal digits"),
        ("pkcs11:token=a%00;object=b" + QUERY, "a zero byte in token"),
        ("pkcs11:token=%ff;object=b" + QUERY, "no UTF-8"),
        ("pkcs11:token=a;object=b?module-path=x.so&pin-source=/p", "no module-path that is an absolute path"),
        ("pkcs11:token=a;object=b?pin-source=/p", "no module-path that is an absolute path"),
        ("pkcs11:token=a;object=b?module-path=/x.so", "no pin-source that is an absolute path"),
        ("pkcs11:token=a;object=b?module-path=/x.so&pin-source=|cat%20/p", "no pin-source that is an absolute path"),
        ("pkcs11:token=a;object=b?module-path=/x.so&pin-source=file://host/p", "no pin-source that is an absolute"),
        ("pkcs11:token=a;object=b?module-name=x&pin-source=/p", "a part that is none of module-path, pin-source"),
        ("pkcs11:token=a;object=b?module-path=/x.so?pin-source=/p", "two question marks"),
    ],
)
def test_what_names_no_key_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        TokenUri.parse(text)


@pytest.mark.parametrize("name", ["pin-value", "PIN-VALUE", "pin%2Dvalue", "pin", "x-pin", "pin-source-value"])
@pytest.mark.parametrize("place", [";{}={}" + QUERY, QUERY + "&{}={}"])
def test_a_pin_in_a_uri_is_refused_and_not_shown(name: str, place: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TokenUri.parse("pkcs11:token=a;object=b" + place.format(name, SECRET))
    assert SECRET not in str(caught.value)


@given(text=st.one_of(st.text(max_size=60), st.from_regex(r"pkcs11:[a-z=;?&%/\-]{0,40}", fullmatch=True)))
def test_whatever_is_written_is_a_uri_or_refused(text: str) -> None:
    try:
        uri = TokenUri.parse(text)
    except ConfigurationError:
        return
    assert uri.token or uri.serial
    assert uri.module.startswith("/")
    assert uri.pin_source.startswith("/")
