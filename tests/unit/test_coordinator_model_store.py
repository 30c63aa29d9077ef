"""The model store: content-addressed, whole or absent, and quick to name a damaged file."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lorica_coordinator.edges.models.model_store import ModelStore, Slab
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.plan_parts import model_store, plan_parts
from lorica_coordinator.service.plan_desk import OpenedPlan
from lorica_coordinator.vectors import model_file
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import CHUNK_BYTES, Layout, ParameterDtype, TensorSpec, manifest_of
from silo_wire.plans.plan import PlanBundle
from tests.support.coordinator_edges import content_of, make_plan, random_vector, stored_vector

LAYOUT = Layout("float32", (TensorSpec("a", (2, 3)), TensorSpec("b", (4,))))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state, make_plan(state)


@pytest.fixture
def state(made: tuple[Path, PlanBundle], tmp_path: Path) -> Path:
    shutil.copytree(made[0], tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def store(made: tuple[Path, PlanBundle], state: Path) -> ModelStore:
    return model_store(state, made[1])


def small_store(
    folder: Path,
    vector: np.ndarray[Any, np.dtype[np.float32]],
    published: ParameterDtype = "float32",
) -> ModelStore:
    """A store of LAYOUT whose initial model is `vector`."""
    manifest = model_file.write(folder / "initial.safetensors", LAYOUT, [vector.tobytes()])
    return ModelStore(
        folder / "models",
        layout=LAYOUT,
        model_layout=LAYOUT.as_type(published),
        initial=manifest.digest,
        initial_file=folder / "initial.safetensors",
    )


def add(store: ModelStore, layout: Layout, seed: int, steps: int = 1) -> Digest:
    data = random_vector(layout, seed).tobytes()
    slabs = (Slab(data[at : at + 4096], {"momentum": data[at : at + 4096]}) for at in range(0, len(data), 4096))
    return store.add(slabs, slots=("momentum",), steps=steps)


def test_initial_model_is_the_plans(store: ModelStore, made: tuple[Path, PlanBundle]) -> None:
    bundle = made[1]
    digest = store.initial()
    assert digest == bundle.plan.model.initial
    assert store.exists(digest)
    assert store.initial() == digest
    tensors = load_file(made[0] / "plans" / "first" / "model.safetensors")
    vector = stored_vector(store, digest)
    for tensor, begin in bundle.layout.placed():
        name = "shared.weight" if tensor.name == "decoder.embed_tokens.weight" else tensor.name
        assert np.array_equal(vector[begin : begin + tensor.elements], tensors[name].reshape(-1))


def test_chunks_are_the_manifests(store: ModelStore) -> None:
    digest = add(store, store._layout, 3)
    manifest = store.manifest(digest)
    assert manifest.digest == digest
    joined = b"".join(store.read_chunk(digest, index) for index in range(manifest.chunks))
    assert joined == random_vector(store._layout, 3).tobytes()
    assert manifest == manifest_of(store._layout, [joined], CHUNK_BYTES)


def test_initial_model_needs_the_plan_folder_only_once(store: ModelStore, state: Path) -> None:
    digest = store.initial()
    shutil.rmtree(state / "plans")
    assert store.initial() == digest


def test_swapped_initial_model_is_refused_and_not_stored(store: ModelStore, state: Path) -> None:
    path = state / "plans" / "first" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        store.initial()
    assert not list((state / "models").glob("*/*"))


def test_models_of_a_store_that_was_opened_again_are_there(
    store: ModelStore, state: Path, made: tuple[Path, PlanBundle]
) -> None:
    digest = add(store, store._layout, 3, steps=4)
    again = model_store(state, made[1])
    assert np.array_equal(stored_vector(again, digest), random_vector(again._layout, 3))
    kept = again.state(digest)
    assert kept.steps == 4
    momentum = kept.slots["momentum"]
    assert content_of(momentum) == random_vector(again._layout, 3).tobytes()


def test_initial_model_begins_without_optimizer_state(store: ModelStore) -> None:
    assert store.state(store.initial()).steps == 0


def test_model_keeps_the_optimizer_state_it_had_first(store: ModelStore) -> None:
    digest = add(store, store._layout, 3, steps=4)
    assert add(store, store._layout, 3, steps=9) == digest
    assert store.state(digest).steps == 4


def test_error_while_a_model_is_made_leaves_nothing(store: ModelStore, state: Path) -> None:
    def broken() -> Iterator[Slab]:
        yield Slab(b"\0" * 4096, {"momentum": b"\0" * 4096})
        raise IntegrityError("a spool was damaged")

    store.initial()
    before = sorted(path.name for path in (state / "models").glob("*/*"))
    with pytest.raises(IntegrityError, match="a spool was damaged"):
        store.add(broken(), slots=("momentum",), steps=1)
    with pytest.raises(IntegrityError, match="a vector of 4096 bytes"):
        store.add([Slab(b"\0" * 4096, {})], slots=(), steps=1)
    assert sorted(path.name for path in (state / "models").glob("*/*")) == before


def test_what_a_killed_process_left_is_cleared(store: ModelStore, state: Path, made: tuple[Path, PlanBundle]) -> None:
    store.initial()
    folder = next(path for path in (state / "models").iterdir() if path.is_dir())
    (folder / ".new-0123" / "optimizer").mkdir(parents=True)
    (folder / ".new-0123" / "model.safetensors").write_bytes(b"half")
    model_store(state, made[1])
    assert not (folder / ".new-0123").exists()


def test_retain_deletes_other_models_and_their_state(store: ModelStore, state: Path) -> None:
    initial, kept, gone = store.initial(), add(store, store._layout, 1), add(store, store._layout, 2)
    store.retain({initial, kept})
    assert (store.exists(initial), store.exists(kept), store.exists(gone)) == (True, True, False)
    assert store.state(kept).steps == 1
    folder = next(path for path in (state / "models").iterdir() if path.is_dir())
    assert {path.name.partition(".")[0] for path in folder.iterdir()} - {"spare"} == {initial, kept}
    with pytest.raises(StorageError, match=f"model {gone} is not stored"):
        store.read_chunk(gone, 0)
    store.retain({initial, kept})


def test_no_model_goes_where_one_that_is_kept_is_not_stored(store: ModelStore, state: Path) -> None:
    """The state is of another instant than the files are. Whatever is missing of that model: all of it, or its file."""
    initial, kept, newer = store.initial(), add(store, store._layout, 1), add(store, store._layout, 2)
    folder = next(path for path in (state / "models").iterdir() if path.is_dir())
    for lost in (folder / f"{kept}.safetensors", folder / f"{kept}.manifest.json"):
        lost.unlink()
        before = sorted(folder.rglob("*"))
        with pytest.raises(StorageError, match=f"model {kept} is not stored.*no other one there is deleted"):
            store.retain({initial, kept})
        assert sorted(folder.rglob("*")) == before
    store.retain({initial})
    assert not store.exists(newer)


def test_next_model_is_written_over_the_files_of_a_deleted_one(store: ModelStore, state: Path) -> None:
    initial, first = store.initial(), add(store, store._layout, 1)
    folder = next(path for path in (state / "models").iterdir() if path.is_dir())
    files_of_first = {(folder / f"{first}.safetensors").stat().st_ino, *inodes(folder / f"{first}.optimizer", "*.f32")}
    store.retain({initial})
    assert inodes(folder / "spare", "*") == files_of_first
    second = add(store, store._layout, 2, steps=2)
    assert {
        (folder / f"{second}.safetensors").stat().st_ino,
        *inodes(folder / f"{second}.optimizer", "*.f32"),
    } == files_of_first
    assert np.array_equal(stored_vector(store, second), random_vector(store._layout, 2))
    assert content_of(store.state(second).slots["momentum"]) == random_vector(store._layout, 2).tobytes()
    assert not inodes(folder / "spare", "*")


def test_spares_are_those_of_one_model_and_can_be_cleared(store: ModelStore, state: Path) -> None:
    initial = store.initial()
    for seed in range(3):
        add(store, store._layout, seed)
    store.retain({initial})
    folder = next(path for path in (state / "models").iterdir() if path.is_dir())
    assert len(inodes(folder / "spare", "*")) == 2
    store.clear_spares()
    assert not inodes(folder / "spare", "*")


def inodes(folder: Path, pattern: str) -> set[int]:
    return {path.stat().st_ino for path in folder.glob(pattern)}


@pytest.mark.parametrize("at", [0, -1])
def test_damaged_model_is_refused_by_name(store: ModelStore, state: Path, at: int) -> None:
    digest = add(store, store._layout, 1)
    path = next((state / "models").glob(f"*/{digest}.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[at if at < 0 else len(model_file.header(store._layout))] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        stored_vector(store, digest)


def test_truncated_and_missing_models_are_refused_by_name(store: ModelStore, state: Path) -> None:
    digest = add(store, store._layout, 1)
    path = next((state / "models").glob(f"*/{digest}.safetensors"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        stored_vector(store, digest)
    path.unlink()
    with pytest.raises(StorageError, match=re.escape(str(path))):
        stored_vector(store, digest)


@pytest.mark.parametrize("content", [b"{}", b"not json", b"[]", b'{"chunks": 3}'])
def test_damaged_manifest_is_refused_by_name(
    store: ModelStore, state: Path, made: tuple[Path, PlanBundle], content: bytes
) -> None:
    digest = add(store, store._layout, 1)
    path = next((state / "models").glob(f"*/{digest}.manifest.json"))
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        model_store(state, made[1]).manifest(digest)


def test_manifest_of_another_model_is_refused(store: ModelStore, state: Path, made: tuple[Path, PlanBundle]) -> None:
    one, other = add(store, store._layout, 1), add(store, store._layout, 2)
    paths = {digest: next((state / "models").glob(f"*/{digest}.manifest.json")) for digest in (one, other)}
    paths[one].write_bytes(paths[other].read_bytes())
    with pytest.raises(IntegrityError, match="its digest is not its name"):
        model_store(state, made[1]).read_chunk(one, 0)


# --- models in bfloat16


def in_bfloat16(vector: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return torch.from_numpy(vector).to(torch.bfloat16).float().numpy()


def test_initial_model_is_published_rounded_with_its_master_beside_it(tmp_path: Path) -> None:
    vector = np.linspace(-1, 1, 10, dtype="<f4")
    store = small_store(tmp_path, vector, "bfloat16")
    digest = store.initial()
    assert np.array_equal(stored_vector(store, digest), in_bfloat16(vector))
    raw = torch.from_numpy(vector).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert digest == manifest_of(LAYOUT.as_type("bfloat16"), [raw]).digest
    state = store.state(digest)
    assert state.steps == 0
    assert content_of(store.master(digest, state)) == vector.tobytes()


def test_initial_model_in_bfloat16_is_known_without_the_plan_folder(tmp_path: Path) -> None:
    vector = np.linspace(-1, 1, 10, dtype="<f4")
    digest = small_store(tmp_path, vector, "bfloat16").initial()
    (tmp_path / "initial.safetensors").unlink()
    again = ModelStore(
        tmp_path / "models",
        layout=LAYOUT,
        model_layout=LAYOUT.as_type("bfloat16"),
        initial=manifest_of(LAYOUT, [vector.tobytes()]).digest,
        initial_file=tmp_path / "initial.safetensors",
    )
    assert again.initial() == digest


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("lost", ["{}.safetensors", "{}.manifest.json", "{}.optimizer/state.json"])
def test_a_model_lacks_each_file_that_the_next_one_is_made_of(
    tmp_path: Path, published: ParameterDtype, lost: str
) -> None:
    store = small_store(tmp_path, np.linspace(-1, 1, 10, dtype="<f4"), published)
    assert store.lacking(store.initial()) == ()
    data, slots = np.linspace(1, 2, 10, dtype="<f4").tobytes(), ("momentum", "master")
    slab = Slab(data[: store.model_layout.total_bytes], dict.fromkeys(slots, data))
    model = store.add([slab], slots=slots, steps=1)
    assert store.lacking(model) == ()
    for name in (lost, *(f"{{}}.optimizer/{slot}.f32" for slot in slots)):
        path = tmp_path / "models" / name.format(model)
        content = path.read_bytes()
        path.unlink()
        assert store.lacking(model) == (path,)
        path.write_bytes(content)
    assert store.lacking(model) == ()
    (tmp_path / "models" / f"{model}.optimizer" / "state.json").write_bytes(b"{}")
    assert store.lacking(model) == (tmp_path / "models" / f"{model}.optimizer" / "state.json",)


@pytest.mark.parametrize("lost", ["initial.json", "{}.safetensors", "{}.manifest.json", "{}.optimizer/state.json"])
def test_initial_model_in_bfloat16_that_was_lost_is_imported_again(tmp_path: Path, lost: str) -> None:
    store = small_store(tmp_path, np.linspace(-1, 1, 10, dtype="<f4"), "bfloat16")
    digest = store.initial()
    (tmp_path / "models" / lost.format(digest)).unlink()
    assert store.initial() == digest
    assert store.lacking(digest) == ()


def test_swapped_initial_model_is_refused_in_bfloat16_too(tmp_path: Path) -> None:
    store = small_store(tmp_path, np.zeros(10, dtype="<f4"), "bfloat16")
    path = tmp_path / "initial.safetensors"
    model_file.write(path, LAYOUT, [np.ones(10, dtype="<f4").tobytes()])
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        store.initial()
    assert not list((tmp_path / "models").glob("*"))


def test_initial_model_that_bfloat16_cannot_hold_is_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path, np.full(10, 3.4e38, dtype="<f4"), "bfloat16")
    with pytest.raises(ConfigurationError, match="rounds to infinity in bfloat16"):
        store.initial()
    assert not list((tmp_path / "models").glob("*"))


# --- the safetensors file itself


def test_written_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    vector = np.arange(10, dtype="<f4")
    model_file.write(tmp_path / "m.safetensors", LAYOUT, [vector[:3].tobytes(), vector[3:].tobytes()])
    tensors = load_file(tmp_path / "m.safetensors")
    assert np.array_equal(tensors["a"], vector[:6].reshape(2, 3))
    assert np.array_equal(tensors["b"], vector[6:])


def test_file_that_safetensors_wrote_in_canonical_order_is_taken(tmp_path: Path) -> None:
    vector = np.arange(10, dtype="<f4")
    save_file({"b": vector[6:], "a": vector[:6].reshape(2, 3)}, tmp_path / "m.safetensors")
    manifest = model_file.manifest_of_file(tmp_path / "m.safetensors", LAYOUT)
    assert manifest == manifest_of(LAYOUT, [vector.tobytes()])


ZEROS = np.zeros((2, 3), dtype=np.float32), np.zeros(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": ZEROS[0]}, "has no tensor b"),
        ({"a": ZEROS[0], "b": ZEROS[1], "c": ZEROS[1]}, "has the tensor c"),
        ({"a": ZEROS[0].T.copy(), "b": ZEROS[1]}, r"tensor a has shape \[3, 2\], the plan's layout has \[2, 3\]"),
        ({"a": ZEROS[0], "b": np.zeros(4, dtype=np.float16)}, "tensor b has type F16, the plan's layout has F32"),
        ({"a": ZEROS[0], "b": np.zeros(4, dtype=np.float64)}, "tensor b has type F64"),
    ],
)
def test_model_of_the_wrong_shape_is_refused(tmp_path: Path, tensors: dict[str, Any], said: str) -> None:
    store = small_store(tmp_path, np.zeros(10, dtype=np.float32))
    save_file(tensors, tmp_path / "initial.safetensors")
    with pytest.raises(ConfigurationError, match=said) as caught:
        store.initial()
    assert str(tmp_path / "initial.safetensors") in str(caught.value)


def rewritten(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert raw.count(old) == 1
    assert len(old) == len(new)
    return raw.replace(old, new)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: b"", "not a safetensors file"),
        (lambda raw: b"PK\x03\x04" + raw, "not a safetensors file"),
        (lambda raw: (1 << 60).to_bytes(8, "little") + raw[8:], "not a safetensors file"),
        (lambda raw: rewritten(raw, b'{"__meta', b'["__meta'), "header is not JSON"),
        (lambda raw: raw[:-4], "holds 36 bytes of data, its tensors need 40"),
        (lambda raw: raw + b"more", "holds 44 bytes of data"),
        (lambda raw: rewritten(raw, b"[0,24]", b"[8,32]"), "tensor a is not where canonical order puts it"),
    ],
)
def test_file_that_is_no_model_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    path = tmp_path / "m.safetensors"
    model_file.write(path, LAYOUT, [bytes(40)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ConfigurationError, match=said):
        model_file.check(path, LAYOUT)


def test_full_disk_is_told_with_the_file_before_anything_is_written(
    store: ModelStore, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.initial()
    before = sorted((state / "models").rglob("*"))
    asked: list[int] = []

    def slabs() -> Iterator[Slab]:
        asked.append(1)
        yield Slab(b"", {})

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be written: No space left on device"):
        store.add(slabs(), slots=("momentum",), steps=1)
    assert asked == []
    assert sorted((state / "models").rglob("*")) == before


def test_disk_that_fills_up_on_the_way_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot allocate beforehand."""
    written: list[int] = []
    write = os.pwrite

    def filling(descriptor: int, data: memoryview, at: int) -> int:
        if sum(written) > 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write(descriptor, data[:20], at))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(StorageError, match=rf"{tmp_path / 'm'} cannot be written: No space left on device"):
        model_file.write(tmp_path / "m", LAYOUT, [bytes(40)])


def made_on_the_cpu(bundle: PlanBundle, models: ModelStore, spools: Spools) -> Aggregator:
    return Aggregator(
        bundle.plan.aggregation, models=models, spools=spools, update_dtype="float32", device=torch.device("cpu")
    )


def test_parts_of_a_plan_share_one_store(state: Path, made: tuple[Path, PlanBundle]) -> None:
    parts = plan_parts(state, spools=Spools(state / "spools"), make_aggregator=made_on_the_cpu)(made[1])
    assert parts.models.initial() == made[1].plan.model.initial
    assert parts.models.lacking(digest_of(b"another"))


def test_what_adapters_are_for_is_needed_with_each_of_their_models(tmp_path: Path) -> None:
    bundle = make_plan(tmp_path, overrides={"adapters.rank": 2})
    parts = plan_parts(tmp_path, spools=Spools(tmp_path / "spools"), make_aggregator=made_on_the_cpu)(bundle)
    assert parts.base is not None
    base, opened = parts.base.initial(), OpenedPlan(bundle, parts, bundle.plan.digest, b"")
    model = parts.models.initial()
    assert opened.lacking(model) == ()
    for part in (".safetensors", ".manifest.json"):
        file = tmp_path / "models" / bundle.plan.digest / "base" / f"{base}{part}"
        content = file.read_bytes()
        file.unlink()
        assert opened.lacking(model) == (file,)
        file.write_bytes(content)
    assert len(opened.lacking(digest_of(b"another"))) == 3
