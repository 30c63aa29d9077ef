"""The signed statement beside an exported model: whatever of it, or of the folder, is changed, the check says so."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from lorica.verify import told
from lorica_coordinator.edges.models.model_card import made_of
from lorica_coordinator.edges.models.provenance import provenance_of
from lorica_coordinator.edges.operator_host.export_client import require_exported
from lorica_coordinator.service.records import MaskedTotals, SignedModel, SiloRow
from lorica_security.audit.chain import Head
from lorica_security.errors import ConfigurationError, IntegrityError
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import new_identity_key, sign
from lorica_security.on_disk.provenance import (
    PROVENANCE_FILE,
    Promise,
    Provenance,
    RoundMade,
    digests_of,
    verified,
)
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from tests.support.federation_peer import small_bundle
from tests.support.round_rows import applied_round

KEY = new_identity_key()


def provenance(files: dict[str, str]) -> Provenance:
    return Provenance(
        federation="north",
        software="0.1.0",
        exported_unix_s=1_790_000_000,
        plan_name="wards",
        plan="a" * 64,
        begun_from="size:mini",
        model="b" * 64,
        round=2,
        rounds=(
            RoundMade(round=1, attempt=2, silos=3, model="c" * 64),
            RoundMade(round=2, attempt=1, silos=4, model="b" * 64),
        ),
        promise=Promise(secure_aggregation=True, level="record", epsilon=8.0, delta=1e-5),
        exact_match=0.625,
        audit_entry=12,
        audit_digest="d" * 64,
        files=files,
    )


def exported(folder: Path, key: Ed25519PrivateKey = KEY) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    (folder / PROVENANCE_FILE).write_bytes(provenance(dict(digests_of(folder))).signed(key))
    return folder


def test_what_was_signed_is_read_back_and_told(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    found = verified(folder, KEY.public_key())
    assert found == provenance(dict(digests_of(folder)))
    assert told(found)[1:6] == [
        f"plan wards {'a' * 64}, begun from size:mini",
        f"model {'b' * 64} of round 2; 2 rounds made one, of 3 to 4 silos",
        "exact match 62.5% on the silos' dev splits together (MicroAvg)",
        "updates came under masks; record-level differential privacy: epsilon 8 at delta 1e-05",
        "2 files are as they were exported",
    ]


def test_attack_what_is_told_cannot_draw_on_the_terminal() -> None:
    hostile = provenance({"config.json": "e" * 64}).model_copy(update={"begun_from": "hub:x\x1b[2J\nsigned by nobody"})
    assert all(line.isprintable() for line in told(hostile))
    assert len(told(hostile)) == 7


HOSTILE_NAME = "\x1b[31mX\nY\x9b"


def test_attack_a_name_in_the_folder_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    (folder / HOSTILE_NAME).write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"is not of the model") as raised:
        verified(folder, KEY.public_key())
    assert str(raised.value).isprintable()


def test_attack_a_key_of_the_statement_cannot_draw_on_the_terminal(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    value = json.loads((folder / PROVENANCE_FILE).read_bytes())
    value["statement"][HOSTILE_NAME] = 1
    (folder / PROVENANCE_FILE).write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match="is no statement of a coordinator") as raised:
        verified(folder, KEY.public_key())
    assert str(raised.value).isprintable()


def test_attack_nothing_is_read_of_a_file_that_was_added(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    with (folder / "a-terabyte").open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and an hour to read
    with pytest.raises(IntegrityError, match="a-terabyte is not of the model"):
        verified(folder, KEY.public_key())


def test_attack_an_export_at_a_time_that_no_clock_shows(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    late = provenance(dict(digests_of(folder))).model_copy(update={"exported_unix_s": 1 << 61})
    (folder / PROVENANCE_FILE).write_bytes(late.signed(KEY))
    with pytest.raises(IntegrityError, match="exported_unix_s"):
        verified(folder, KEY.public_key())


def grown(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"\0")


def flipped(folder: Path) -> None:
    raw = bytearray((folder / "config.json").read_bytes())
    raw[500] ^= 1
    (folder / "config.json").write_bytes(raw)


def a_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def a_link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere")


def signed_for_another_purpose(folder: Path) -> None:
    statement = provenance(dict(digests_of(folder))).statement
    signature = sign(KEY, domain=b"audit-head", payload=statement)
    value = {"statement": json.loads(statement), "signature": signature.hex()}
    (folder / PROVENANCE_FILE).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (grown, "model.safetensors was changed since the export"),
        (flipped, "config.json was changed since the export"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "pickle.bin").write_bytes(b"x"), "pickle.bin is not of the model"),
        (lambda folder: (folder / "more").mkdir(), "more is not of the model"),
        (a_pipe, "config.json is no plain file"),
        (a_link, "config.json is no plain file"),
        (signed_for_another_purpose, "is not signed by the key that was given"),
    ],
    ids=["grown", "flipped", "missing", "added", "folder", "pipe", "link", "other purpose"],
)
def test_attack_a_changed_folder_is_found(tmp_path: Path, change: Callable[[Path], object], says: str) -> None:
    folder = exported(tmp_path / "model")
    change(folder)
    with pytest.raises(IntegrityError, match=says):
        verified(folder, KEY.public_key())


def test_attack_another_key_signed_it(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", new_identity_key())
    with pytest.raises(IntegrityError, match="is not signed by the key that was given"):
        verified(folder, KEY.public_key())


def test_a_folder_without_a_statement_says_so(tmp_path: Path) -> None:
    folder = exported(tmp_path / "model")
    (folder / PROVENANCE_FILE).unlink()
    with pytest.raises(ConfigurationError, match=r"has no provenance\.json"):
        verified(folder, KEY.public_key())


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield at
        return
    for key, inner in items:
        yield from leaves(inner, (*at, key))


STATEMENT = json.loads(provenance({"config.json": "e" * 64}).statement)
OTHER = {str: "f" * 64, int: 77, float: 0.5, bool: False}


@pytest.mark.parametrize("at", list(leaves(STATEMENT)), ids=lambda at: ".".join(map(str, at)))
def test_attack_no_value_of_the_statement_can_be_changed_under_its_signature(
    tmp_path: Path, at: tuple[Any, ...]
) -> None:
    folder = exported(tmp_path / "model")
    value = json.loads((folder / PROVENANCE_FILE).read_bytes())
    inner = value["statement"]
    if at[0] == "files":
        at = ("files", "config.json")
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = {**OTHER, str: "g" if len(str(inner[at[-1]])) < 64 else "f" * 64}[type(inner[at[-1]])]
    (folder / PROVENANCE_FILE).write_text(json.dumps(value))
    with pytest.raises(IntegrityError):
        verified(folder, KEY.public_key())


@given(
    raw=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.text(max_size=5) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["statement", "signature", "files", "x"]), inner, max_size=4)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_hostile_bytes_are_no_statement(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / PROVENANCE_FILE).write_bytes(raw)
    with pytest.raises(IntegrityError, match="is no statement of a coordinator"):
        verified(folder, KEY.public_key())


@pytest.mark.parametrize(
    ("scored", "masked", "told_of_it"),
    [(1, False, None), (2, False, None), (3, False, 0.25), (0, True, 0.25)],
)
def test_the_score_of_a_single_silo_is_not_told(scored: int, masked: bool, told_of_it: float | None) -> None:
    plan = small_bundle().plan
    evaluation = Evaluation(
        split="dev", examples=8, exact_matches=2, loss_per_token=1.0, executed=0, execution_matches=0, seconds=1.0
    )
    silos = [
        SiloRow(silo=SiloName(name), outcome="committed", evaluation=evaluation if number < scored else None)
        for number, name in enumerate(("a", "b", "c"))
    ]
    row = applied_round(
        masked=MaskedTotals(weight_sum=1.0, saturated=0, coordinates=3) if masked else None,
        silos=tuple(silos),
        macro_exact_match=None if masked else 0.25,
        micro_exact_match=0.25,
    )
    exported = SignedModel(model=row.model, round=1, signature=b"")
    made = made_of([row], row.model)
    signed = provenance_of(plan, exported, made=made, head=Head(), now=1.0, files={"config.json": "e" * 64})
    assert signed.exact_match == made.score == told_of_it
    assert signed.rounds[0].silos == 3


@pytest.mark.parametrize(("plan", "model"), [("a", "c"), ("c", "b")])
def test_an_export_of_another_model_or_plan_is_not_pushed_in_the_place_of_this_one(
    tmp_path: Path, plan: str, model: str
) -> None:
    folder = exported(tmp_path / "model")
    require_exported(folder, KEY.public_key(), Digest("a" * 64), Digest("b" * 64))
    with pytest.raises(ConfigurationError, match=r"holds model b+ of plan wards .*choose another folder"):
        require_exported(folder, KEY.public_key(), Digest(plan * 64), Digest(model * 64))
    with pytest.raises(IntegrityError, match="not signed by the key"):
        require_exported(folder, new_identity_key().public_key(), Digest("a" * 64), Digest("b" * 64))
