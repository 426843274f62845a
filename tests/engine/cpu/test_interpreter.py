"""What Triton's interpreter changes in a process, and what it leaves as it is. Each case has a process of its own."""

import json
import os
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton.backends
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.engine.cpu.processes import run
from vllm_dllm.cpu import activate, fallbacks, install, interpreter

AR_ENGINE = Path(__file__).with_name("ar_engine.py")


def test_the_entry_point_is_no_platform():
    assert activate() is None


def test_int8_weights_stay_off_amx_where_activations_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    # A processor with AMX; the monkeypatch puts back what was there.
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: True)
    install.keep_int8_of_floats_off_amx()
    for dtype, takes_amx in ((torch.float32, False), (torch.bfloat16, True)):
        with set_default_torch_dtype(dtype):
            assert cpu.check_cpu_sgl_kernel(32, 32, torch.int8) == takes_amx


@pytest.mark.parametrize(("num_rows", "scales"), [(3, 3), (20, 20), (3, 1)])
def test_fp8_products_have_a_scale_for_each_row(num_rows: int, scales: int) -> None:
    """PyTorch has a kernel for these on every processor."""
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Kernel

    install.scale_fp8_by_rows()
    generator = torch.Generator().manual_seed(0)
    # vLLM pads few rows.
    inputs = torch.randn(max(num_rows, 17), 32, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(16, 32, generator=generator).to(torch.float8_e4m3fn).t()
    of_rows, of_outputs = torch.rand(scales, 1, generator=generator), torch.rand(16, 1, generator=generator)
    with mock.patch("torch._scaled_mm", wraps=torch._scaled_mm) as multiply:
        product = Kernel.apply_scaled_mm(
            None,
            A=inputs,
            B=weights,
            out_dtype=torch.float32,
            As=of_rows,
            Bs=of_outputs,
            bias=None,
            output_shape=[num_rows, 16],
        )
    given = multiply.call_args.kwargs
    assert (given["scale_a"].shape, given["scale_b"].shape) == ((len(inputs), 1), (1, 16))
    expected = inputs[:num_rows].float() * of_rows @ (weights.float() * of_outputs.t())
    torch.testing.assert_close(product, expected)


PROBE = """
import json, os, torch
asked = []
torch.cpu._is_amx_tile_supported = lambda: True
torch.cpu._init_amx = lambda: asked.append(True)
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
import vllm.triton_utils
from vllm_dllm.cpu import install as cpu
from vllm_dllm.cpu import interpreter
current_platform.device_type
seen = [vllm.triton_utils.HAS_TRITON, "cpu" in __import__("triton").backends.backends]
load_general_plugins()
cpu.install()
from vllm.v1.sample.ops import topk_topp_sampler
from unittest import mock
from vllm.triton_utils import dispatcher
with mock.patch.object(dispatcher, "_rebind_kernels", wraps=dispatcher._rebind_kernels) as rebind:
    registrations = [current_platform.register_triton_kernel_overrides() or rebind.call_count for _ in range(2)]
print(json.dumps({
    "active": interpreter.active(),
    "interpret": os.environ.get("TRITON_INTERPRET"),
    "before": seen,
    "after": [vllm.triton_utils.HAS_TRITON, "cpu" in __import__("triton").backends.backends],
    "sampler": topk_topp_sampler.HAS_TRITON,
    "asked for AMX": asked,
    "real": vllm.triton_utils.triton.__name__ == "triton" and hasattr(vllm.triton_utils.triton, "runtime"),
    "registrations": registrations,
}))
"""


@pytest.mark.slow
def test_kernels_are_real_while_everything_else_still_sees_no_triton():
    assert json.loads(run("-c", PROBE)) == {
        "active": True,
        "interpret": "1",
        "before": [True, True],
        "after": [False, False],
        "sampler": False,
        # Or the first kernel of 4-bit weights would end a process in which oneDNN has multiplied nothing.
        "asked for AMX": [True],
        "real": True,
        # Fallbacks are registered once for all engines of a process, vLLM's own together with those of the package.
        "registrations": [1, 1],
    }


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not resolved its platform yet."""
    monkeypatch.setattr(interpreter, "_registered", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(triton.backends.backends, "cpu", raising=False)


def switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def have_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def have_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.vllm_version_matches_substr", lambda _: False)


def have_cpu_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = EntryPoint("cpu", "triton_cpu", "triton.backends")
    monkeypatch.setattr(interpreter, "entry_points", lambda group: EntryPoints([backend]))


def test_the_interpreter_is_on_on_the_cpu_build(fresh_process):
    activate()
    assert interpreter.active()
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert triton.backends.backends["cpu"].driver.is_active()


@pytest.mark.parametrize("setting", [switch_off, have_cuda_device, have_cuda_build, have_cpu_triton])
def test_the_interpreter_stays_off(fresh_process, monkeypatch, setting):
    setting(monkeypatch)
    interpret = os.environ.get("TRITON_INTERPRET")
    activate()
    assert not interpreter.active()
    assert os.environ.get("TRITON_INTERPRET") == interpret
    assert "cpu" not in triton.backends.backends


def config(**fields: object) -> SimpleNamespace:
    model = SimpleNamespace(is_diffusion=False)
    defaults = {
        "model_config": model,
        "speculative_config": None,
        "watermark_config": None,
        "attention_config": SimpleNamespace(hisparse_config=None),
    }
    return SimpleNamespace(**defaults | fields)


DIFFUSION = SimpleNamespace(is_diffusion=True)


@pytest.mark.parametrize(
    ("fields", "needs_v2"),
    [
        ({}, False),
        ({"model_config": None}, False),
        ({"model_config": DIFFUSION}, True),
        ({"speculative_config": SimpleNamespace(draft_model_config=None)}, False),
        ({"speculative_config": SimpleNamespace(draft_model_config=DIFFUSION)}, True),
        ({"watermark_config": object()}, True),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, True),
    ],
)
def test_only_diffusion_and_features_of_v2_need_model_runner_v2(fields, needs_v2):
    assert install.needs_v2(config(**fields)) is needs_v2


@pytest.mark.parametrize(
    ("symbol", "complaint"),
    [("_no_such_kernel", "has no vllm.*_no_such_kernel"), ("_post_update_kernel", "and no cu_num_logits")],
)
def test_a_kernel_that_vllm_has_changed_is_named(symbol, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        fallbacks.find(f"input_batch.{symbol}", fallbacks.batch.expand_idx_mapping)


@pytest.mark.slow
def test_an_autoregressive_model_is_served_by_v1_and_v2_gives_the_same_tokens():
    default = json.loads(run(str(AR_ENGINE), is_warm=True))
    v2 = json.loads(run(str(AR_ENGINE), is_warm=True, VLLM_USE_V2_MODEL_RUNNER="1"))
    assert default["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert v2["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert v2["tokens"] == default["tokens"]


def test_inductor_does_without_a_target(monkeypatch):
    """Whoever asked Triton for its driver before the interpreter was hidden has got our driver."""
    from torch._inductor.runtime import autotune_cache
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", interpreter._Driver())
    monkeypatch.setattr(autotune_cache, "has_triton", lambda: True)
    torch.utils._triton.triton_backend.cache_clear()
    torch.utils._triton.triton_hash_with_backend.cache_clear()
    assert autotune_cache.inductor_meta_from_config()["backend_hash"] is None
