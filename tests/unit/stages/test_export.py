"""Exporting committed weights: what is taken, what is written, and what is refused."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel

from tests.unit.training import tiny
from verl_omni_core.errors import ConfigError, ContractError, StoreError
from verl_omni_core.stages import export as stage
from verl_omni_core.stages.export import export
from verl_omni_core.stages.trained import find_weights, spans
from verl_omni_core.store import trusted
from verl_omni_core.training import export as writing
from verl_omni_core.weights.filesystem import read_update


@pytest.mark.parametrize(
    ("run", "asked", "expected"),
    [
        ("adapters", {}, (1, "average")),
        ("adapters", {"network": "policy"}, (2, "policy")),
        ("adapters", {"network": "policy", "step": 0}, (0, "policy")),
        ("plain", {}, (1, "policy")),
        ("full", {}, (3, "policy")),
    ],
)
def test_the_newest_weights_are_taken_and_the_average_where_there_is_one(store, run, asked, expected):
    found = find_weights(store, run, **asked)
    assert (found.step, found.network) == expected


def test_weights_that_are_not_there_are_answered_with_those_that_are(store):
    with pytest.raises(ConfigError, match=r"average after step 2; it has policy: step 0-2; average: step 1$"):
        find_weights(store, "adapters", step=2)
    with pytest.raises(ConfigError, match="training.ema_decay is none"):
        find_weights(store, "plain", network="average")
    with pytest.raises(StoreError, match="no run 'other'"):
        find_weights(store, "other")


def test_steps_are_told_asspans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_an_adapter_is_written_as_trained_with_a_record_of_its_origin(store, weights, tmp_path):
    done = export("adapters", tmp_path / "out", store=store)
    assert (done.format, done.step, done.network, done.kind) == ("peft", 1, "average", "lora")
    assert done.largest_difference < 1e-5
    update = read_update(tmp_path / "out", 1)
    assert update.tensors.keys() == weights["average"].tensors.keys()
    assert all(torch.equal(update.tensors[name], tensor) for name, tensor in weights["average"].tensors.items())
    assert json.loads((tmp_path / "out" / "export.json").read_text())["checksum"] == done.checksum
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "runs"]


def test_an_exported_adapter_starts_another_training_run_where_it_ended(store, weights, pipeline, tmp_path):
    export("plain", tmp_path / "out", store=store)
    made = tiny.engine(pipeline, warm=str(tmp_path / "out"))
    named, _ = made.get_per_tensor_param()
    assert all(torch.equal(tensor, weights["policy"].tensors[name]) for name, tensor in named)


def test_a_merged_pipeline_has_stock_names_only(store, pipeline, tmp_path):
    done = export("adapters", tmp_path / "out", store=store, format="diffusers")
    assert done.format == "diffusers" and 0 < done.largest_difference < 1e-4
    names = {
        n
        for n, _ in SD3Transformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer").named_parameters()
    }
    assert names == {
        n for n, _ in SD3Transformer2DModel.from_pretrained(pipeline, subfolder="transformer").named_parameters()
    }


def test_a_fully_trained_run_exports_its_pipeline_bit_for_bit(store, weights, tmp_path):
    done = export("full", tmp_path / "out", store=store)
    assert (done.format, done.kind) == ("diffusers", "full") and done.largest_difference < 1e-5
    found = SD3Transformer2DModel.from_pretrained(tmp_path / "out", subfolder="transformer").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights["full"].tensors.items())
    with pytest.raises(ConfigError, match="trained all parameters"):
        export("full", tmp_path / "other", store=store, format="peft")


def test_a_folder_in_use_is_left_alone(store, tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export("adapters", tmp_path, store=store)
    assert (tmp_path / "note").read_text() == "mine"


def test_files_that_compute_something_else_never_get_the_folders_name(store, tmp_path, monkeypatch):
    def with_another_scale(folder, tensors, config):
        return writing.export_adapter(folder, tensors, {**config, "lora_alpha": 9})

    monkeypatch.setattr(stage, "export_adapter", with_another_scale)
    with pytest.raises(ContractError, match="another velocity through diffusers"):
        export("adapters", tmp_path / "out", store=store)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]


@pytest.mark.parametrize("change", ["drop", "add", "number"])
def test_a_tensor_missing_left_over_or_changed_is_found(store, tmp_path, monkeypatch, change):
    def spoiled(folder, tensors, config):
        tensors = dict(tensors)
        name = next(iter(tensors))
        if change == "drop":
            module = name.split(".lora_")[0]
            tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{module}.lora_")}
        elif change == "add":
            tensors |= {f"proj_out.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
        else:
            tensors[name] = tensors[name] + 1e-6
        return writing.export_adapter(folder, tensors, config)

    monkeypatch.setattr(stage, "export_adapter", spoiled)
    with pytest.raises((ContractError, ValueError, RuntimeError, UserWarning)):
        export("adapters", tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_not_exported(store, tmp_path):
    (path,) = (store / "adapters/steps/000001/sync-average/attempts").glob("*/adapter_model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    # another process: this one trusts what it wrote itself

    trusted._trusted.clear()
    with pytest.raises(StoreError, match="sha256"):
        export("adapters", tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()
