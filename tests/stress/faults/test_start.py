"""What is wrong with a checkpoint, a file or the memory ends the start within seconds, and the message names it."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from tests.engine.shared import started_quickly
from tests.engine.speculators.engines import drafter, target
from vllm_dllm.decoding.draft_graph import DraftGraph

from .checkpoints import SDAR, Tensors, copy, truncated, with_tensors

DEADLINE = 10.0
"""Seconds to the message, from the first word to vLLM on. Some two on an idle machine, whose processor they count."""
BUSY = 6
"""Times as many may pass where other tests have the processor."""

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}
K_PROJ = "model.layers.1.self_attn.k_proj.weight"

Options = dict[str, Any]
Make = Callable[[Path], tuple[Path, Options]]
"""Writes what is wrong below a folder; returns the model to start, and the engine's options."""


def broken(change: Callable[[Tensors], object] = lambda tensors: None, **config: Any) -> Make:
    """Tensors or values of ``config.json`` that are wrong."""
    return lambda folder: (with_tensors(SDAR, folder / "model", change, **config), {})


def drafting(**options: Any) -> Options:
    return {"additional_config": {"dllm": {"max_drafts": 3, **options}}}


def graph(content: str | dict[str, Any]) -> Make:
    """A draft graph that is wrong."""

    def make(folder: Path) -> tuple[Path, Options]:
        path = folder / "graph.json"
        if isinstance(content, str):
            path.write_text(content)
        else:
            DraftGraph(nodes=(frozenset({(1, 1)}),), **content).save(path)
        return SDAR, drafting(draft_graph=str(path), verify="spiffy")

    return make


def memory(size: int, **options: Any) -> Make:
    """A KV cache of ``size`` bytes."""
    return lambda folder: (SDAR, {"kv_cache_memory_bytes": size, **options})


def drafted_by(make_drafter: Callable[[Path], Path]) -> Make:
    """An autoregressive model with a drafter."""
    return lambda folder: (
        target(),
        {"speculative_config": {"method": "dllm", "model": str(make_drafter(folder)), "num_speculative_tokens": 4}},
    )


def _drafter_without(name: str) -> Callable[[Path], Path]:
    return lambda folder: with_tensors(drafter("causal"), folder / "drafter", lambda tensors: tensors.pop(name))


FAULTS: dict[str, tuple[Make, str]] = {
    "missing tensors": (broken(lambda tensors: tensors.pop(K_PROJ)), f"missing: {K_PROJ}$"),
    "extra tensors": (
        broken(lambda tensors: tensors.update(extra=torch.ones(2))),
        r"no place for: extra \(model.safetensors\)",
    ),
    "wrong shapes": (
        broken(lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ][:-8]})),
        rf"of another shape: {K_PROJ} \(model.safetensors\) is \[120, 256\] and should be \[128, 256\]",
    ),
    "NaN weights": (
        broken(lambda tensors: tensors[K_PROJ].fill_(torch.nan)),
        rf"not finite \(NaN or infinite\): {K_PROJ} \(model.safetensors\) has 32768 of 32768",
    ),
    "a truncated file": (lambda folder: (truncated(SDAR, folder / "model"), {}), "model.safetensors cannot be read"),
    "no tensors at all": (lambda folder: (copy(SDAR, folder / "model"), {}), "Cannot find any model weights with `/"),
    "no mask id": (
        broken(mask_token_id=None),
        "mask_token_id=151669 is not a token of the model, which has 2048; set it with --hf-overrides",
    ),
    "an unknown architecture": (
        broken(architectures=["MercuryForCausalLM"]),
        r"architectures \['MercuryForCausalLM'\] are not supported",
    ),
    "an unknown model type": (broken(model_type="mercury"), "has model type `mercury` but Transformers does not"),
    "a draft graph that is no JSON": (graph('{"nodes": [[[1, 1]'), "draft graph .*graph.json: Invalid JSON: EOF"),
    "a draft graph of another family": (
        graph({"family": "LLaDA2"}),
        "is for family LLaDA2, and this model has family SDAR",
    ),
    "a draft graph of another model": (
        graph({"fingerprint": "aa", "model": "some/model"}),
        r"is for architecture aa \(it was made for some/model\), and this model has architecture",
    ),
    "a draft graph of another block length": (
        graph({"block_length": 32}),
        "is for block length 32, and this model has block length 16",
    ),
    "no memory for drafts": (memory(1 << 20, **drafting()), "max_drafts=3 and max_num_seqs=4 set .* aside for drafts"),
    "no memory for one request": (
        memory(1 << 20, max_model_len=1024, block_size=32),
        r"at least one request with the model's max seq len \(1024\)",
    ),
    "a drafter that is not there": (
        drafted_by(lambda folder: folder / "nowhere"),
        "model='.*/nowhere' of speculative_config, the drafter of .*target-48, is neither a folder with a model nor",
    ),
    "a drafter without a tensor": (
        drafted_by(_drafter_without("model.norm.weight")),
        "drafter does not hold the model .* missing: model.norm.weight",
    ),
}
"""What is wrong, and a pattern of the message."""


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named_before_anything_runs(fault: str, tmp_path: Path) -> None:
    make, message = FAULTS[fault]
    model, options = make(tmp_path)
    start, start_computing = time.monotonic(), time.process_time()
    with started_quickly(), pytest.raises((ValueError, OSError, RuntimeError), match=message):
        LLM(str(model), **{**DEFAULTS, **options})
    assert time.process_time() - start_computing < DEADLINE
    assert time.monotonic() - start < BUSY * DEADLINE


def test_the_model_that_the_faults_are_made_of_starts(tmp_path: Path) -> None:
    shutil.copytree(SDAR, tmp_path / "model")
    with started_quickly():
        llm = LLM(str(tmp_path / "model"), **{**DEFAULTS, **drafting()})
    assert (
        llm.llm_engine.model_config.hf_config.mask_token_id
        == json.loads((SDAR / "config.json").read_text())["mask_token_id"]
    )
    llm.llm_engine.engine_core._finalizer.atexit = False
    llm.llm_engine.engine_core.shutdown()
