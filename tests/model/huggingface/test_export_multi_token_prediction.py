"""Layers for multi-token prediction: exports are read by transformers, whose logits they equal in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.model.huggingface.export import export_hf
from phalanx.model.transformer import Ahead
from phalanx.spec.errors import UserError
from phalanx.spec.families.registry import families
from phalanx.spec.files.load import load_model_spec, run_from_table
from tests.helpers.random_models import build_model, load_model
from tests.model.huggingface.test_checkpoint_traps import (
    EAGER,
    TOKENS,
    fp32_as_fp64,
    fp64_by_default,
    save_random_model,
)

PREDICTION_FIELD = "num_nextn_predict_layers"
FAMILIES = {
    "glm4_moe": {PREDICTION_FIELD: 1},
    "deepseek_v3": {PREDICTION_FIELD: 2},
    "qwen3_5_text": {"num_hidden_layers": 2},
}
"""Fields of config.json. The last layer of a Qwen3.5 with two has attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_further_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    original = save_random_model(tmp_path / "original", family, **FAMILIES[family])
    layers = FAMILIES[family].get(PREDICTION_FIELD, 1)
    spec = load_model_spec(str(original)).replace(mtp={"layers": layers})
    trained = build_model(spec)
    exported = tmp_path / "exported"
    export_hf(spec, dict(trained.state_dict()), exported, source=original if family == "glm4_moe" else None)
    file = exported / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})

    model = load_model(exported, mtp={"layers": layers})
    state = trained.state_dict()
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in model.state_dict().items())
    logits: list[Tensor] = []

    def keep_logits(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        logits.append(F.linear(x_BTD, weight_VD))
        return x_BTD.new_zeros(())

    count = TOKENS.shape[1] - layers
    ahead = torch.stack([TOKENS[:, distance:][:, :count] for distance in range(1, layers + 1)])
    with torch.no_grad():
        model(TOKENS[:, :count], ahead=Ahead(ahead, [keep_logits] * layers))
    torch.testing.assert_close(logits, transformers_logits(exported, ahead), rtol=0, atol=1e-10)


def transformers_logits(directory: Path, ahead: Tensor) -> list[Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    with fp64_by_default(), fp32_as_fp64(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **EAGER).eval()
        num_layers = model.config.num_hidden_layers
        if hasattr(model.config, PREDICTION_FIELD):
            # transformers knows the numbers of published models only.
            layers = range(num_layers, num_layers + len(ahead))
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\." for layer in layers]
        else:
            model.config.num_mtp_layers = len(ahead)
            model.config.mtp_layer_types = ["full_attention"]
        predicting = MtpModel.from_pretrained(model).eval()
        count = ahead.shape[2]
        hidden = model.model(TOKENS[:, :count]).last_hidden_state
        logits = []
        for layer, ids in enumerate(ahead):
            hidden = predicting.forward_layer(layer, hidden, torch.arange(count)[None], None, input_ids=ids)
            logits.append(predicting._project_to_logits(hidden))
        return logits


@pytest.mark.parametrize(("family", "layers"), [("qwen3_5_text", 2), ("llama", 1)])
def test_initial_weights_without_such_layers_are_refused_when_the_run_is_read(
    tmp_path: Path, family: str, layers: int
) -> None:
    save_random_model(tmp_path, family)
    model = {"from_hf": str(tmp_path), "mtp": {"layers": layers}}
    with pytest.raises(
        UserError, match=rf"model\.mtp\.layers = {layers} is not supported by checkpoints of type {family}"
    ):
        run_from_table({"model": model, "data": {"tokenizer": "bytes"}})


def test_wrong_number_of_layers_is_refused_by_name(tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen3_5_text")
    model = {"from_hf": str(tmp_path), "mtp": {"layers": "two"}}
    with pytest.raises(UserError, match=r"model\.mtp\.layers = 'two' must be a valid integer"):
        run_from_table({"model": model, "data": {"tokenizer": "bytes"}})


def test_checkpoint_without_its_layers_is_refused(tmp_path: Path) -> None:
    original = save_random_model(tmp_path, "glm4_moe")
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.3[^ ]* *\n? *fix: .*remove model\.mtp"):
        load_model(original, mtp={})


def test_families_with_such_layers() -> None:
    """The names of GLM and DeepSeek, which other families do not have, are not inherited."""
    assert {name for name, family in families().items() if family.mtp} == {
        *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    }


def test_family_without_such_layers_exports_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(mtp={})
    export_hf(model.spec, dict(model.state_dict()), tmp_path / "exported")
    assert "type llama cannot have 1 layer for multi-token prediction" in caplog.text
    again = load_model(tmp_path / "exported")
    state = model.state_dict()
    assert len(again.state_dict()) < len(state)
    assert all(torch.equal(tensor.float(), state[name].float()) for name, tensor in again.state_dict().items())
