"""A checkpoint that does not hold its model is not loaded, and the message names the tensors and their files."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.paths import BUNDLED
from vllm_dllm.models.checkpoint import CheckpointError
from vllm_dllm.plugin import register

from .checkpoints import DREAM, LLADA, SDAR, Tensors, copy, truncated, with_tensors

register()

LLADA2 = BUNDLED / "llada2_moe" / "checkpoint"
"""With experts."""

Change = Callable[[Tensors], object]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process groups that vLLM's parallel layers expect, of this process alone or those of an engine."""
    if model_parallel_is_initialized():
        yield
        return
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def load(checkpoint: Path, dtype: str = "float32", **arguments: Any) -> nn.Module:
    """Load a checkpoint as vLLM does, without an engine."""
    config = EngineArgs(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        # Some leave it out.
        hf_overrides={"mask_token_id": 0},
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def refused(checkpoint: Path, **arguments: Any) -> str:
    """Why a checkpoint is not loaded."""
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, **arguments)
    message = str(error.value)
    assert message.startswith(str(checkpoint))
    return message.removeprefix(str(checkpoint))


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def resized(name: str, *shape: int) -> Change:
    """A tensor of another shape, its numbers those of the old one as far as they go."""

    def change(tensors: Tensors) -> None:
        old = tensors[name]
        tensors[name] = torch.zeros(shape)
        common = tuple(slice(min(pair)) for pair in zip(old.shape, shape, strict=True))
        tensors[name][common] = old[common]

    return change


def filled(name: str, value: float) -> Change:
    """A tensor one of whose numbers is another."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        pytest.param(SDAR, ["model.layers.1.self_attn.k_proj.weight"], id="one of three in a layer"),
        pytest.param(SDAR, ["model.layers.0.mlp.up_proj.weight"], id="one of two in a layer"),
        pytest.param(SDAR, ["model.layers.2.self_attn.o_proj.weight"], id="a layer"),
        pytest.param(SDAR, ["model.layers.0.self_attn.q_norm.weight"], id="a norm"),
        pytest.param(SDAR, ["model.embed_tokens.weight"], id="the embedding"),
        pytest.param(SDAR, ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"], id="two"),
        pytest.param(LLADA, ["model.transformer.blocks.1.ff_proj.weight"], id="under LLaDA's names"),
        pytest.param(LLADA, ["model.transformer.blocks.0.ff_out.weight"], id="LLaDA's down projection"),
        pytest.param(LLADA, ["model.transformer.ln_f.weight"], id="LLaDA's last norm"),
        pytest.param(DREAM, ["model.layers.1.self_attn.v_proj.bias"], id="a bias"),
        pytest.param(LLADA2, ["model.layers.1.mlp.experts.3.up_proj.weight"], id="half of an expert"),
        pytest.param(LLADA2, ["model.layers.1.mlp.experts.0.down_proj.weight"], id="the other half"),
        pytest.param(LLADA2, ["model.layers.1.mlp.gate.expert_bias"], id="a router's bias"),
        pytest.param(LLADA2, ["model.layers.1.mlp.shared_experts.gate_proj.weight"], id="shared experts"),
        pytest.param(LLADA2, ["model.layers.0.attention.query_key_value.weight"], id="fused in the file"),
    ],
)
def test_missing_tensors_are_named_as_the_checkpoint_would(checkpoint: Path, names: list[str], tmp_path: Path) -> None:
    if not checkpoint.is_dir():
        pytest.skip(f"there is no model in {checkpoint}")
    message = refused(with_tensors(checkpoint, tmp_path / "model", without(*names)))
    found = re.fullmatch(r" does not hold the model that its config.json describes; missing: (.*)", message)
    assert found is not None
    assert sorted(found[1].split(", ")) == sorted(names)


@pytest.mark.parametrize(
    ("checkpoint", "change", "what"),
    [
        pytest.param(
            SDAR,
            lambda tensors: tensors.update({"model.layers.0.self_attn.gate.weight": torch.ones(3)}),
            "the model has no place for: model.layers.0.self_attn.gate.weight (model.safetensors)",
            id="an extra tensor",
        ),
        pytest.param(
            SDAR,
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}),
            "the model has no place for: model.layers.0.self_attn.q_proj.bias (model.safetensors)",
            id="a bias that vLLM would drop",
        ),
        pytest.param(
            LLADA,
            lambda tensors: tensors.update({"model.transformer.wpe.weight": torch.ones(3)}),
            "the model has no place for: model.transformer.wpe.weight (model.safetensors)",
            id="an extra tensor of LLaDA",
        ),
        pytest.param(
            LLADA2,
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(3)}),
            "the model has no place for: model.layers.1.mlp.experts.8.up_proj.weight (model.safetensors)",
            id="an expert too many",
        ),
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_named(
    checkpoint: Path, change: Change, what: str, tmp_path: Path
) -> None:
    if not checkpoint.is_dir():
        pytest.skip(f"there is no model in {checkpoint}")
    message = refused(with_tensors(checkpoint, tmp_path / "model", change))
    assert message == f" does not hold the model that its config.json describes; {what}"


def test_what_changes_nothing_may_be_there(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)

    changed, plain = load(with_tensors(SDAR, tmp_path / "model", add)), load(SDAR)
    for (name, ours), (_, theirs) in zip(changed.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def _shape(checkpoint: Path, name: str) -> list[int]:
    return list(load_file(checkpoint / "model.safetensors")[name].shape)


@pytest.mark.parametrize(
    ("checkpoint", "name", "dim", "more"),
    [
        # vLLM would cut what is too long, and say nothing.
        pytest.param(SDAR, "model.layers.1.self_attn.q_proj.weight", 0, 32, id="too many rows"),
        pytest.param(SDAR, "model.layers.1.self_attn.k_proj.weight", 0, -32, id="too few rows"),
        pytest.param(SDAR, "model.layers.1.mlp.gate_proj.weight", 0, 8, id="too wide"),
        pytest.param(SDAR, "model.layers.1.mlp.down_proj.weight", 1, 8, id="too many columns"),
        pytest.param(SDAR, "model.norm.weight", 0, -1, id="a norm"),
        pytest.param(SDAR, "model.embed_tokens.weight", 0, 1, id="a token too many"),
        pytest.param(DREAM, "model.layers.0.self_attn.k_proj.bias", 0, 1, id="a bias"),
        pytest.param(LLADA, "model.transformer.blocks.0.attn_out.weight", 0, 1, id="LLaDA"),
        pytest.param(LLADA2, "model.layers.1.mlp.experts.3.up_proj.weight", 0, 8, id="a wide expert"),
        pytest.param(LLADA2, "model.layers.1.mlp.experts.3.down_proj.weight", 1, -8, id="a narrow expert"),
        pytest.param(LLADA2, "model.layers.0.attention.query_key_value.weight", 0, 32, id="fused in the file"),
    ],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    checkpoint: Path, name: str, dim: int, more: int, tmp_path: Path
) -> None:
    if not checkpoint.is_dir():
        pytest.skip(f"there is no model in {checkpoint}")
    shape = _shape(checkpoint, name)
    wrong = [size + more * (index == dim) for index, size in enumerate(shape)]
    model = with_tensors(checkpoint, tmp_path / "model", resized(name, *wrong))
    assert refused(model) == (
        " does not hold the model that its config.json describes; "
        f"of another shape: {name} (model.safetensors) is {wrong} and should be {shape}"
    )


def test_a_config_of_another_size_is_told_by_its_tensors(tmp_path: Path) -> None:
    layers = json.loads((SDAR / "config.json").read_text())["num_hidden_layers"]
    message = refused(with_tensors(SDAR, tmp_path / "model", num_hidden_layers=layers + 1))
    assert f"missing: model.layers.{layers}.self_attn.q_proj.weight, " in message
    assert " and 5 more" in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        (SDAR, "model.layers.1.self_attn.v_proj.weight"),
        (SDAR, "model.embed_tokens.weight"),
        (LLADA, "model.transformer.blocks.1.up_proj.weight"),
        (LLADA2, "model.layers.1.mlp.experts.3.gate_proj.weight"),
    ],
)
def test_numbers_that_are_not_finite_are_found(checkpoint: Path, name: str, value: float, tmp_path: Path) -> None:
    if not checkpoint.is_dir():
        pytest.skip(f"there is no model in {checkpoint}")
    size = load_file(checkpoint / "model.safetensors")[name].numel()
    model = with_tensors(checkpoint, tmp_path / "model", filled(name, value))
    assert refused(model) == (
        f" has numbers that are not finite (NaN or infinite): {name} (model.safetensors) has 1 of {size}"
    )


def test_numbers_that_the_type_of_the_computation_cannot_hold_are_found(tmp_path: Path) -> None:
    model = with_tensors(SDAR, tmp_path / "model", filled("model.layers.1.self_attn.v_proj.weight", 1e6))
    assert refused(model, dtype="float16") == (
        " has numbers that are not finite (NaN or infinite): model.layers.1.self_attn.qkv_proj.weight in torch.float16"
    )
    load(model, dtype="bfloat16")


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    model = truncated(SDAR, tmp_path / "model")
    message = refused(model)
    size = (model / "model.safetensors").stat().st_size
    assert message.startswith(f"/model.safetensors cannot be read, {size} bytes: ")
    assert message.endswith("Is it cut off? Download it again")


def test_a_file_of_the_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    tensors = load_file(SDAR / "model.safetensors")
    files = {name: f"model-0000{1 + name.startswith('model.layers.1.')}-of-00002.safetensors" for name in tensors}
    model = copy(SDAR, tmp_path / "model")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    first = "model-00001-of-00002.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if files[name] == first}, model / first)
    with pytest.raises(
        FileNotFoundError, match=r"referenced in index but missing: .*/model-00002-of-00002.safetensors"
    ):
        load(model)


def test_a_folder_without_tensors_is_named(tmp_path: Path) -> None:
    model = copy(SDAR, tmp_path / "model")
    with pytest.raises(RuntimeError, match=f"Cannot find any model weights with `{re.escape(str(model))}`"):
        load(model)


def test_later_updates_may_be_of_single_tensors() -> None:
    model: Any = load(SDAR)
    name = "model.norm.weight"
    new = torch.full_like(model.get_parameter(name), 2.0)
    model.load_weights([(name, new)])
    assert torch.equal(model.get_parameter(name), new)


def test_random_weights_may_be_updated_by_single_tensors() -> None:
    model: Any = load(SDAR, load_format="dummy")
    name = "model.norm.weight"
    new = torch.full_like(model.get_parameter(name), 2.0)
    model.load_weights([(name, new)])
    assert torch.equal(model.get_parameter(name), new)
