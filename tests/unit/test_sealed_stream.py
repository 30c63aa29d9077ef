"""A sealed file opens whole and unchanged under its passphrase, or not at all."""

import io

import pytest

from lorica_security.errors import IntegrityError, LoricaError
from lorica_security.host import sealed_stream
from lorica_security.host.key_file import Passphrase, WrongPassphrase
from lorica_security.host.sealed_stream import MAGIC, PIECE_BYTES, SealedReader, SealedWriter

PASSPHRASE = Passphrase(b"correct horse battery staple", "LORICA_BACKUP_PASSPHRASE")
TAG = 16
HEAD = len(MAGIC) + 16


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_cost" not in request.node.name:
        monkeypatch.setattr(sealed_stream, "_SCRYPT_N", 2)


def sealed(content: bytes) -> bytes:
    file = io.BytesIO()
    writer = SealedWriter(file, PASSPHRASE)
    for at in range(0, len(content), 300_001):
        writer.write(content[at : at + 300_001])
    writer.finish()
    return file.getvalue()


def opened(data: bytes, passphrase: Passphrase = PASSPHRASE) -> bytes:
    file = io.BytesIO(data)
    assert file.read(len(MAGIC)) == MAGIC
    return io.BufferedReader(SealedReader(file, passphrase, where="the file")).read()


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 7]
)
def test_what_went_in_comes_out(size: int) -> None:
    data = sealed(content(size))
    assert opened(data) == content(size)
    assert len(data) == HEAD + size + TAG * max(1, -(-size // PIECE_BYTES))
    assert size < 64 or content(size)[:64] not in data  # a single byte may be anything by chance


def test_two_files_of_one_content_have_nothing_in_common_at_its_real_cost() -> None:
    first, second = sealed(b"the same"), sealed(b"the same")
    assert first[len(MAGIC) :] != second[len(MAGIC) :]
    assert opened(first) == opened(second) == b"the same"


def test_another_passphrase_opens_nothing() -> None:
    with pytest.raises(WrongPassphrase, match="the file does not open with the passphrase of"):
        opened(sealed(b"secret"), Passphrase(b"another horse battery staple", "LORICA_BACKUP_PASSPHRASE"))


WHOLE = HEAD + PIECE_BYTES + TAG


@pytest.mark.parametrize("at", [len(MAGIC), HEAD - 1, HEAD, HEAD + PIECE_BYTES, WHOLE - 1, WHOLE, -1])
def test_a_flipped_bit_anywhere_is_found(at: int) -> None:
    data = bytearray(sealed(content(2 * PIECE_BYTES + 5)))
    data[at] ^= 1
    with pytest.raises((WrongPassphrase, IntegrityError), match="changed or cut"):
        opened(bytes(data))


@pytest.mark.parametrize("length", [HEAD, HEAD + 1, HEAD + TAG, WHOLE - 1, WHOLE, WHOLE + 3, 2 * WHOLE - HEAD, -1])
def test_a_file_that_was_cut_is_found_also_between_pieces(length: int) -> None:
    with pytest.raises((WrongPassphrase, IntegrityError)):
        opened(sealed(content(2 * PIECE_BYTES + 5))[:length])


def test_pieces_that_change_places_or_are_added_are_found() -> None:
    data = sealed(content(3 * PIECE_BYTES))
    piece = PIECE_BYTES + TAG
    first, second, third = (data[HEAD + index * piece : HEAD + (index + 1) * piece] for index in range(3))
    for pieces in (
        (second, first, third),
        (first, third),
        (first, second, third, third),
        (first, first, second, third),
    ):
        with pytest.raises(LoricaError):
            opened(data[:HEAD] + b"".join(pieces))
    with pytest.raises(LoricaError):
        opened(data + b"x")
    with pytest.raises(LoricaError, match="does not open"):
        opened(sealed(content(9))[:HEAD] + data[HEAD:])


def test_nothing_of_a_piece_that_does_not_open_is_given_out() -> None:
    data = bytearray(sealed(content(2 * PIECE_BYTES)))
    data[-1] ^= 1
    file = io.BytesIO(bytes(data))
    file.read(len(MAGIC))
    reader = SealedReader(file, PASSPHRASE, where="the file")
    got = bytearray()

    def read_all() -> None:
        while block := reader.read(1 << 16):
            got.extend(block)

    with pytest.raises(IntegrityError, match=f"after {PIECE_BYTES} bytes that are whole"):
        read_all()
    assert bytes(got) == content(2 * PIECE_BYTES)[:PIECE_BYTES]


def test_a_file_without_its_end_does_not_open() -> None:
    file = io.BytesIO()
    SealedWriter(file, PASSPHRASE).write(content(2 * PIECE_BYTES))
    with pytest.raises(LoricaError):
        opened(file.getvalue())
