"""Weights that change under the engine: from then on its answers are those of an engine that began with them."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, RequestOutput, SamplingParams

from tests.engine import full_attention
from tests.engine.harness import checkpoint_of, engine, generate, greedy, tensor_parallel_engine, tokens_of

FULL = full_attention.FAMILIES
OPTIONS: dict[str, dict[str, Any]] = {
    "sdar": {"block_length": 16, "max_drafts": 3},
    "llada2_moe": {"block_length": 32},
    "fast_dllm_v2": {"block_length": 8, "sub_block_length": 4},
    "llada": {"block_length": 16, "cache": "dual", "max_drafts": 3},
    "dream": {"block_length": 8, "cache": "prefix"},
}
PROMPTS = [[3 + (5 * i + j) % 90 for j in range(length)] for i, length in enumerate((70, 70, 40, 9, 33))]
PROMPTS.append([*PROMPTS[0][:64], 7, 8, 9])  # begins as another does


def first_checkpoint(family: str) -> Path:
    return full_attention.bundled(family).checkpoint if family in FULL else checkpoint_of(family)


@pytest.fixture
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The family's checkpoint with noise on its matrices."""
    folder = tmp_path / "second"
    shutil.copytree(first_checkpoint(request.getfixturevalue("family")), folder)
    generator = torch.Generator().manual_seed(1)
    for file in folder.glob("*.safetensors"):
        noisy = {}
        for name, tensor in load_file(file).items():
            is_matrix = tensor.is_floating_point() and tensor.ndim > 1
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.3 if is_matrix else 0
            noisy[name] = (tensor + noise).to(tensor.dtype)
        save_file(noisy, file, metadata={"format": "pt"})
    return folder


def start(family: str, checkpoint: Path, **more: Any) -> LLM:
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 4096, "block_size": 32}
    if family not in FULL:
        sizes["enable_prefix_caching"] = True
    return engine(checkpoint, dllm=OPTIONS[family], **{**sizes, **more})


def params_of(family: str) -> list[SamplingParams]:
    drafts: dict[str, Any] = {"dllm_verify": "freedave", "dllm_drafts": 4} if "max_drafts" in OPTIONS[family] else {}
    return [greedy(max_tokens=40, extra_args=drafts if i % 2 else {}) for i in range(len(PROMPTS))]


def answers(llm: LLM, family: str) -> list[list[int]]:
    return [tokens_of(output) for output in generate(llm, PROMPTS, params_of(family))]


def reload(llm: LLM, folder: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


@pytest.mark.parametrize("family", OPTIONS)
def test_answers_are_those_of_an_engine_that_began_with_the_weights(family: str, second: Path) -> None:
    llm = start(family, first_checkpoint(family))
    old = answers(llm, family)
    assert answers(llm, family) == old  # from the prefix cache
    new = answers(start(family, second), family)
    assert new != old
    try:
        reload(llm, second)
        assert answers(llm, family) == new
    finally:
        reload(llm, first_checkpoint(family))
    assert answers(llm, family) == old


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_running_requests_go_on_with_the_new_weights_alone(family: str, second: Path) -> None:
    """Tokens that were emitted stay. What follows is what an engine with the new weights says behind them."""
    llm, fresh = start(family, first_checkpoint(family)), start(family, second)
    params = params_of(family)
    for number, (prompt, asked) in enumerate(zip(PROMPTS, params, strict=True)):
        llm.llm_engine.add_request(f"running {number}", {"prompt_token_ids": prompt}, asked)
    emitted: dict[str, list[int]] = {}
    finished: dict[str, list[int]] = {}
    for _ in range(8):
        _step(llm, emitted, finished)
    assert not finished
    before = {name: list(tokens) for name, tokens in emitted.items()}
    assert any(before.values())
    try:
        reload(llm, second)
        while llm.llm_engine.has_unfinished_requests():
            _step(llm, emitted, finished)
    finally:
        reload(llm, first_checkpoint(family))
    for number, prompt in enumerate(PROMPTS):
        tokens, known = finished[f"running {number}"], before.get(f"running {number}", [])
        assert tokens[: len(known)] == known
        rest = greedy(max_tokens=40 - len(known), extra_args=params[number].extra_args)
        assert tokens[len(known) :] == tokens_of(generate(fresh, [prompt + known], [rest])[0])


def _step(llm: LLM, emitted: dict[str, list[int]], finished: dict[str, list[int]]) -> None:
    outputs: Sequence[RequestOutput] = llm.llm_engine.step()  # type: ignore[assignment]
    for output in outputs:
        emitted[output.request_id] = list(output.outputs[0].token_ids)
        if output.finished:
            finished[output.request_id] = emitted[output.request_id]


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def cut(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].clone()


def spoil(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[3] = torch.nan


def exceed(tensors: dict[str, torch.Tensor], name: str) -> None:
    """In float64, which float32 has no room for."""
    tensors[name] = tensors[name].double()
    tensors[name].view(-1)[3] = 1e300


def add(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors["extra"] = tensors[name].clone()


WRONG: tuple[tuple[Callable[[dict[str, torch.Tensor], str], None], str], ...] = (
    (drop, "missing: NAME"),
    (cut, "of another shape: NAME"),
    (spoil, "numbers that are not finite .*: NAME has 1 of"),
    (exceed, "numbers that are not finite .* in torch.float32: NAME has 1 of"),
    (add, "the model has no place for: extra"),
)


@pytest.mark.parametrize("family", OPTIONS)
def test_checkpoints_that_are_not_the_models_leave_the_old_weights(family: str, tmp_path: Path) -> None:
    llm = start(family, first_checkpoint(family))
    old = answers(llm, family)

    def refuses(folder: Path, message: str) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                reload(llm, folder)
        assert answers(llm, family) == old, message

    refuses(tmp_path / "none", "cannot be loaded")
    for change, message in WRONG:
        folder = tmp_path / change.__name__
        shutil.copytree(first_checkpoint(family), folder)
        file = sorted(folder.glob("*.safetensors"))[-1]
        tensors = load_file(file)
        name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and re.search(r"\.\d+\.", name))
        change(tensors, name)
        save_file(tensors, file, metadata={"format": "pt"})
        refuses(folder, message.replace("NAME", re.escape(name)))
    reload(llm, first_checkpoint(family))
    assert answers(llm, family) == old


def test_numbers_of_eight_bits_are_looked_at_too_and_a_refused_folder_is_not_taken_for_the_models(
    tmp_path: Path,
) -> None:
    family, right, wrong = "sdar", tmp_path / "right", tmp_path / "wrong"
    llm = start(family, first_checkpoint(family))
    for folder in (right, wrong):
        shutil.copytree(first_checkpoint(family), folder)
    (file,) = wrong.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and re.search(r"\.\d+\.", name))
    spoil(tensors, name)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    reload(llm, right)
    with pytest.raises(ValueError, match=rf"wrong has numbers that are not finite .*: {re.escape(name)} has 1 of"):
        reload(llm, wrong)
    drop(tensors, name)
    save_file(tensors, right / file.name, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="right does not hold the model"):
        llm.collective_rpc("reload_weights")
    reload(llm, first_checkpoint(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sdar"])
def test_with_tensor_parallel_two(family: str, second: Path) -> None:
    new = answers(start(family, second), family)
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 32, "enable_prefix_caching": True}
    with tensor_parallel_engine(first_checkpoint(family), dllm=OPTIONS[family], **sizes) as llm:
        assert answers(llm, family) != new
        reload(llm, second)
        assert answers(llm, family) == new
        # A refusal leaves no answer of a rank behind, which a later call would get.
        for wrong in ("no checkpoint", ""):
            with pytest.raises(ValueError, match="cannot be loaded"):
                llm.collective_rpc("reload_weights", kwargs={"weights_path": wrong})
        assert answers(llm, family) == new
        assert [rank for (rank,) in llm.collective_rpc(rank_of)] == [0, 1]
        reload(llm, first_checkpoint(family))
        assert answers(llm, family) != new


def rank_of(worker: Any) -> tuple[int]:
    return (worker.rank,)
