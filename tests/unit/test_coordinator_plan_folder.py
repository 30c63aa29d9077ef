"""Plan folders: made from a size or a folder, edited, compiled; what is changed, impossible or dangerous is refused."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration

from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import FolderModel, HubModel, SizedModel
from lorica_coordinator.plans.plan_folder import compile_plan, create_plan
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.plans.plan_text import plan_template, plan_text
from lorica_coordinator.plans.presets import PRESETS, preset
from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError, StateError, Unreachable
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import Plan, PlanBundle, PlanOfAnotherRelease
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.model import ModelSection
from silo_wire.plans.sections.schedule import EvaluationSection, ScheduleSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.sizes import SIZES
from silo_wire.v1 import federation_pb2
from tests.support.coordinator import initialise
from tests.support.coordinator_edges import FEDERATION, make_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state / "plans" / "first", make_plan(state)


@pytest.fixture
def folder(made: tuple[Path, PlanBundle], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    copy = tmp_path / "plans" / "first"
    shutil.copytree(made[0], copy)
    return copy


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "plan.toml"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_same_seed_gives_the_same_plan(made: tuple[Path, PlanBundle], tmp_path: Path) -> None:
    again = make_plan(tmp_path)
    assert again.plan.digest == made[1].plan.digest
    assert again.files == made[1].files


def test_another_seed_gives_another_model_and_the_same_tokenizer(made: tuple[Path, PlanBundle], tmp_path: Path) -> None:
    other = make_plan(tmp_path, seed=8).plan
    assert other.model.initial != made[1].plan.model.initial
    assert other.model.files == made[1].plan.model.files


def test_making_a_plan_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    make_plan(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embedding_is_stored_and_counted_once(made: tuple[Path, PlanBundle]) -> None:
    folder, bundle = made
    model = T5ForConditionalGeneration(T5Config.from_json_file(folder / "config.json"))
    assert bundle.plan.model.parameters == sum(value.numel() for value in model.parameters())
    names = [tensor.name for tensor in bundle.layout.tensors]
    assert names.count("decoder.embed_tokens.weight") == 1
    assert not {"shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"} & set(names)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "shared.weight" in file.keys()  # noqa: SIM118  # safe_open is no mapping
        assert len(file.keys()) == len(names)


def test_vocabulary_is_the_tokenizers(made: tuple[Path, PlanBundle]) -> None:
    config = json.loads(made[1].files["config.json"])
    pieces = json.loads(made[1].files["tokenizer.json"])["model"]["vocab"]
    assert config["vocab_size"] == len(pieces)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_t5_with_the_parameters_that_the_table_states(size: str) -> None:
    import silo_wire.plans.sizes as sizes

    stated = re.search(rf"^    {size} +([0-9.]+) M ", sizes.__doc__ or "", re.MULTILINE)
    assert stated is not None
    shape = SIZES[size]
    pieces = min(shape.vocabulary, 2600) if size in ("micro", "mini", "tiny", "compact") else shape.vocabulary
    config = T5Config(
        vocab_size=pieces,
        d_model=shape.d_model,
        d_kv=shape.d_kv,
        d_ff=shape.d_ff,
        num_layers=shape.layers,
        num_heads=shape.heads,
        feed_forward_proj="gated-gelu" if shape.gated else "relu",
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    assert sum(value.numel() for value in model.parameters()) / 1e6 == pytest.approx(float(stated[1]), rel=0.12)


def test_gated_size_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "micro-gated", SIZES["micro"].__class__(
        d_model=32, d_kv=8, d_ff=64, layers=1, heads=4, vocabulary=600, gated=True
    ))  # fmt: skip
    bundle = make_plan(tmp_path, source=SizedModel("micro-gated"))
    assert any("wi_1" in tensor.name for tensor in bundle.layout.tensors)


def test_operators_own_public_text_makes_the_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("SELECT zygote FROM zebra\n" * 50 + "how many zebras are there ?\n" * 50)
    bundle = make_plan(tmp_path, source=SizedModel("micro", vocabulary=400, tokenizer_text=text))
    pieces = [piece for piece, _ in json.loads(bundle.files["tokenizer.json"])["model"]["vocab"]]
    assert any("zebra" in piece for piece in pieces)


# --- plan.toml


def test_plan_toml_parses_to_the_plan_that_wrote_it(made: tuple[Path, PlanBundle]) -> None:
    folder, bundle = made
    assert Plan.from_toml((folder / "plan.toml").read_text(), "plan.toml") == bundle.plan


def test_plan_text_keeps_every_value(made: tuple[Path, PlanBundle]) -> None:
    changed = made[1].plan.model_dump(mode="json")
    changed["schedule"] |= {"rounds": 33, "start_when_ready": True, "training_deadline_s": 1e-05}
    changed["aggregation"] |= {"server_optimizer": "yogi", "tau": 1e-9, "max_weight_share": 0.5}
    changed["schedule"]["min_silos"] = 2
    changed["training"] |= {"dropout": 0.0, "overrides": {"bank-b": {"learning_rate": 1e-4, "epochs": 3}}}
    plan = Plan.model_validate(changed)
    assert Plan.from_toml(plan_text(plan), "plan.toml") == plan


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("schedule", ScheduleSection),
        ("aggregation", AggregationSection),
        ("training", TrainingSection),
        ("evaluation", EvaluationSection),
    ],
)
def test_template_explains_every_key_and_has_its_default(section: str, kind: type[BaseModel]) -> None:
    parsed = tomllib.loads(plan_template())
    text = plan_template().partition(f"[{section}]")[2].partition("\n[")[0]
    for key, field in kind.model_fields.items():
        if key == "overrides":
            continue
        assert re.search(rf"^# [^\n]+\n(?:# )?{key} = ", text, re.MULTILINE), f"{section}.{key} is not explained"
        if not field.is_required() and field.default is not None:
            assert parsed[section][key] == field.default
    assert set(parsed[section]) <= set(kind.model_fields)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_plan(name: str) -> None:
    model = ModelSection(
        source="size:mini",
        parameters=1,
        layout="0" * 64,
        initial="0" * 64,
        files={"config.json": "0" * 64, "layout.json": "0" * 64},
    )
    values = {"name": "p", "federation": "f", "model": model.model_dump(), **preset(name)}
    plan = Plan.model_validate(values)
    assert Plan.from_toml(plan_text(plan), name) == plan


def test_paper_presets_have_the_facts_of_the_paper() -> None:
    rates, measures = {}, {}
    for name in ("paper-text", "paper-code"):
        values = preset(name)
        training = TrainingSection.model_validate(values["training"])
        assert (training.optimizer, training.gradient_accumulation, training.max_grad_norm) == ("adafactor", 16, 1.0)
        assert (training.learning_rate_schedule, training.loss_log_steps) == ("linear", 4)
        measures[name] = training.loss_reduction
        aggregation = AggregationSection.model_validate(values["aggregation"])
        assert (aggregation.weighting, aggregation.server_optimizer) == ("lorar", "sgd")
        assert (aggregation.server_learning_rate, aggregation.momentum) == (1.0, 0.9)
        assert (values["schedule"]["rounds"], values["evaluation"]["every"]) == (60, 5)
        assert [training.for_silo(silo).epochs for silo in ("atis", "advising", "geoquery")] == [6, 6, 12]
        assert training.for_silo("atis").batch_size == 8
        silos = ("restaurants", "academic", "imdb", "yelp", "scholar", "geoquery", "atis", "advising")
        rates[name] = {silo for silo in silos if training.for_silo(silo).learning_rate == 1e-3}
        assert training.for_silo("advising").batch_size == (8 if name == "paper-text" else 4)
    assert rates["paper-code"] == {"restaurants", "academic", "imdb", "yelp"}
    assert measures == {"paper-text": "logged", "paper-code": "as_published"}
    assert rates["paper-text"] == {"restaurants", "academic", "imdb", "scholar"}


def test_overrides_replace_the_presets_values(tmp_path: Path) -> None:
    changes = {"schedule.rounds": 3, "training.overrides.bank-b.epochs": 5, "training.dropout": 0.0}
    plan = make_plan(tmp_path, overrides=changes).plan
    assert (plan.schedule.rounds, plan.training.overrides["bank-b"].epochs, plan.training.dropout) == (3, 5, 0.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"overrides": {"schedule.roundz": 3}}, "unknown key schedule.roundz"),
        ({"overrides": {"roundz": 3}}, "unknown key roundz"),
        ({"overrides": {"schedule.rounds.x": 3}}, "unknown key schedule.rounds.x"),
        ({"overrides": {"model.parameters": 3}}, "model.parameters cannot be set here"),
        ({"overrides": {"seed": 3}}, "seed cannot be set here"),
        ({"overrides": {"schedule.min_silos": 0}}, "schedule.min_silos = 0"),
        (
            {"overrides": {"aggregation.max_weight_share": 0.2, "schedule.min_silos": 3}},
            "cannot hold with min_silos = 3",
        ),
        ({"name": "Bad Name"}, "name = 'Bad Name'"),
        ({"federation": "Bad"}, "federation = 'Bad'"),
        ({"preset": "fast"}, "preset 'fast' is unknown: use one of default, paper-text, paper-code"),
        ({"source": SizedModel("huge")}, "model size 'huge' is unknown: use one of micro, mini"),
        ({"source": SizedModel("micro", vocabulary=10)}, "vocabulary size 10"),
        ({"source": SizedModel("micro", tokenizer_text=Path("/nowhere/text"))}, "tokenizer text /nowhere/text"),
        ({"source": FolderModel(Path("/nowhere"))}, "model /nowhere: it has no config.json"),
    ],
)
def test_refused_plan_leaves_nothing_behind(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make_plan(tmp_path, **arguments)
    assert not list(tmp_path.glob("plans/*"))
    assert not list(tmp_path.glob("plans/.*"))


def test_existing_plan_is_not_overwritten(folder: Path) -> None:
    before = (folder / "plan.toml").read_bytes()
    with pytest.raises(ConfigurationError, match="plan 'first' already exists"):
        create_plan(folder.parent, name="first", federation=FEDERATION, source=SizedModel("micro"), seed=9)
    assert (folder / "plan.toml").read_bytes() == before


def test_edit_makes_another_plan_of_the_same_model(folder: Path, made: tuple[Path, PlanBundle]) -> None:
    edit(folder, "rounds = 30", "rounds = 21")
    bundle = compile_plan(folder)
    assert bundle.plan.schedule.rounds == 21
    assert bundle.plan.digest != made[1].plan.digest
    assert bundle.plan.model == made[1].plan.model


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rounds = 30", "rounds = 30\nroundz = 3", "unknown key schedule.roundz"),
        ("rounds = 30", "rounds = 0", "schedule.rounds = 0"),
        ("rounds = 30", 'rounds = "20"', "schedule.rounds = '20'"),
        ("max_weight_share = 0.0", "max_weight_share = 0.4", "max_weight_share = 0.4 cannot hold with min_silos = 2"),
        ("rounds = 30", "rounds = ", "is not TOML"),
        ('name = "first"', 'name = "second"', "name = 'second', but its folder is called 'first'"),
        ('"config.json" = ', '"model.py" = ', "'model.py' is not a file that a plan bundle may hold"),
    ],
)
def test_bad_edit_is_refused_naming_file_and_key(folder: Path, old: str, new: str, said: str) -> None:
    edit(folder, old, new)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        compile_plan(folder)
    assert str(folder / "plan.toml") in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "layout.json", "model.safetensors"])
def test_changed_file_is_refused_by_name(folder: Path, name: str) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[-2] ^= 1
    (folder / name).write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(folder / name))):
        compile_plan(folder)


@pytest.mark.parametrize("name", ["plan.toml", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(LoricaError, match=re.escape(str(folder / name))):
        compile_plan(folder)


def test_remote_code_in_an_edited_config_is_refused(folder: Path) -> None:
    old = digest_of((folder / "config.json").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    edit(folder, f'"config.json" = "{old}"', f'"config.json" = "{digest_of((folder / "config.json").read_bytes())}"')
    with pytest.raises(ConfigurationError, match="names code to run"):
        compile_plan(folder)


def test_a_tokenizer_of_another_family_is_refused_before_silos_are_offered_it(folder: Path) -> None:
    old = digest_of((folder / "tokenizer.json").read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    new = digest_of((folder / "tokenizer.json").read_bytes())
    edit(folder, f'"tokenizer.json" = "{old}"', f'"tokenizer.json" = "{new}"')
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is none of T5's family: normalizer has Replace"):
        compile_plan(folder)


def test_layout_of_another_shape_is_refused(folder: Path) -> None:
    """An attacker who may edit the folder, digests included, still cannot pass a model of the wrong shape."""
    raw = (folder / "layout.json").read_bytes()
    changed = raw.replace(b'"decoder.final_layer_norm.weight",[32]', b'"decoder.final_layer_norm.weight",[16]')
    assert changed != raw
    (folder / "layout.json").write_bytes(changed)
    text = (folder / "plan.toml").read_text().replace(digest_of(raw), digest_of(changed))
    parameters = int(re.findall(r"^parameters = (\d+)$", text, re.MULTILINE)[0])
    (folder / "plan.toml").write_text(text.replace(f"parameters = {parameters}", f"parameters = {parameters - 16}"))
    with pytest.raises(ConfigurationError, match=r"decoder.final_layer_norm.weight has shape \[32\]"):
        compile_plan(folder)


# --- models from a Hugging Face folder


@pytest.fixture(scope="module")
def origin(made: tuple[Path, PlanBundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` of transformers leaves it, with a tokenizer."""
    folder = tmp_path_factory.mktemp("origin") / "my-t5"
    model = T5ForConditionalGeneration.from_pretrained(made[0])
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made[0] / name, folder)
    return folder


@pytest.fixture
def model_folder(origin: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "my-t5"
    shutil.copytree(origin, copy)
    return copy


def change_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_model_folder_gives_the_same_parameters(
    model_folder: Path, made: tuple[Path, PlanBundle], tmp_path: Path
) -> None:
    bundle = make_plan(tmp_path, source=FolderModel(model_folder))
    assert bundle.plan.model.initial == made[1].plan.model.initial
    assert bundle.plan.model.source == "folder:my-t5"


def test_untied_output_layer_is_a_parameter_of_its_own(model_folder: Path, tmp_path: Path) -> None:
    """T5 v1.1: `lm_head.weight` differs from the embedding, and must survive creation."""
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    change_config(model_folder, tie_word_embeddings=False, scale_decoder_outputs=False)
    bundle = make_plan(tmp_path, source=FolderModel(model_folder))
    names = [tensor.name for tensor in bundle.layout.tensors]
    assert {"decoder.embed_tokens.weight", "lm_head.weight"} <= set(names)
    before = T5ForConditionalGeneration.from_pretrained(model_folder).eval()
    after = T5ForConditionalGeneration.from_pretrained(tmp_path / "plans" / "first").eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    with torch.no_grad():
        assert torch.equal(before(input_ids=ids, labels=ids).logits, after(input_ids=ids, labels=ids).logits)
    assert after.lm_head.weight is not after.shared.weight


def test_pickle_is_refused_with_the_remedy(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=r"only pytorch_model.bin, which is pickle.*model.safetensors"):
        make_plan(tmp_path, source=FolderModel(model_folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(model_folder: Path, tmp_path: Path, name: str) -> None:
    change_config(model_folder, name, auto_map={"AutoModel": "evil.Model"})
    with pytest.raises(ConfigurationError, match=f"{name} has auto_map, which names code to run"):
        make_plan(tmp_path, source=FolderModel(model_folder))


def test_code_in_a_model_folder_is_neither_run_nor_copied(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "modeling_t5.py").write_text("raise SystemExit('this code was run')")
    make_plan(tmp_path, source=FolderModel(model_folder))
    assert not list((tmp_path / "plans" / "first").glob("*.py"))


def test_other_model_types_are_refused(model_folder: Path, tmp_path: Path) -> None:
    change_config(model_folder, model_type="bert")
    with pytest.raises(ConfigurationError, match="model_type 'bert': only those of T5 are taken"):
        make_plan(tmp_path, source=FolderModel(model_folder))


def test_tokenizer_larger_than_the_model_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    model.resize_token_embeddings(500)
    model.save_pretrained(model_folder)
    with pytest.raises(ConfigurationError, match=r"has 1000 pieces, vocab_size in config\.json is 500"):
        make_plan(tmp_path, source=FolderModel(model_folder))


def test_missing_tensor_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    del tensors["encoder.final_layer_norm.weight"]
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"missing tensor encoder\.final_layer_norm\.weight"):
        make_plan(tmp_path, source=FolderModel(model_folder))


def test_model_that_holds_nan_is_refused(model_folder: Path, tmp_path: Path) -> None:
    model = T5ForConditionalGeneration.from_pretrained(model_folder)
    with torch.no_grad():
        model.encoder.final_layer_norm.weight[3] = float("nan")
    model.save_pretrained(model_folder)
    with pytest.raises(ConfigurationError, match=r"encoder\.final_layer_norm\.weight holds NaN"):
        make_plan(tmp_path, source=FolderModel(model_folder))


def test_unreachable_hub_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unreachable, match="did not give hub:google/nothing-here: check the network"):
        make_plan(tmp_path, source=HubModel("google/nothing-here"))


def test_mistyped_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a Hub name"):
        make_plan(tmp_path, source=HubModel("a/b/c"))


# --- the shelf


def test_shelf_keeps_what_was_compiled_when_the_folder_goes(folder: Path) -> None:
    shelf = PlanShelf(folder.parent.parent)
    assert shelf.names() == ("first",)
    bundle = shelf.compile("first")
    shutil.rmtree(folder)
    kept = shelf.bundle(bundle.plan.digest)
    assert (kept.plan, kept.files) == (bundle.plan, bundle.files)
    assert shelf.names() == ()
    with pytest.raises(ConfigurationError, match="plan 'first' is not in"):
        shelf.compile("first")


def test_shelf_refuses_an_unknown_digest_and_a_name_that_is_a_path(folder: Path) -> None:
    shelf = PlanShelf(folder.parent.parent)
    with pytest.raises(StateError, match="was never compiled here"):
        shelf.bundle(digest_of(b"another"))
    with pytest.raises(ConfigurationError, match="is not allowed"):
        shelf.compile("../plans/first")


DATABASE, BUCKET = "postgresql+psycopg://lorica@127.0.0.1:1/state", "s3://lorica/north?region=eu-central-1"


@pytest.mark.parametrize(
    ("database", "blobs", "said"),
    [
        ("", "", "was never compiled here: run coordinator plan show NAME"),
        (DATABASE, "", "is not in state/bundles of this folder: copy state/bundles of the folder that has it"),
        (DATABASE, BUCKET, "nor .* in the bucket of .*: restore it from the bucket's versions, or copy state/bundles"),
    ],
)
def test_a_copy_that_is_missing_comes_from_where_it_was_kept(
    database: str, blobs: str, said: str, tmp_path: Path
) -> None:
    own = initialise(tmp_path / "net")
    text = own.settings.read_text().replace('database = ""', f'database = "{database}"')
    own.settings.write_text(text.replace('blobs = ""', f'blobs = "{blobs}"'))
    with pytest.raises(StateError, match=said):
        Coordinator.load(own).shelf.bundle(digest_of(b"another"))


def test_a_copy_of_another_release_is_told_from_a_damaged_one(folder: Path) -> None:
    """Its plan has a key that this release does not know, in the digest that it had there."""
    shelf = PlanShelf(folder.parent.parent)
    message = federation_pb2.PlanBundle.FromString(shelf.compile("first").encode())
    message.plan_json = message.plan_json.replace(b'{"adapters"', b'{"a_key_of_old":1,"adapters"', 1)
    plan = digest_of(message.plan_json)
    path = folder.parent.parent / "bundles" / f"{plan}.bundle"
    path.write_bytes(message.SerializeToString(deterministic=True))
    with pytest.raises(PlanOfAnotherRelease, match=r"unknown key a_key_of_old.*coordinator plan new"):
        shelf.bundle(plan)
    for damaged in (path.read_bytes()[:-20], path.read_bytes().replace(b"a_key_of_old", b"a_key_of_ole", 1)):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match="was damaged"):
            shelf.bundle(plan)


def test_damaged_copy_is_refused_by_name(folder: Path) -> None:
    shelf = PlanShelf(folder.parent.parent)
    plan = shelf.compile("first").plan.digest
    path = folder.parent.parent / "bundles" / f"{plan}.bundle"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        shelf.bundle(plan)
