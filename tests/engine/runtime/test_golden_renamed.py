"""Golden data elsewhere: the same models with other token ids, so that nothing here knows the mask token by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import full_attention
from tests.engine.harness import case_params, engine_of, generate, nfe_of, tokens_of
from tests.paths import BUNDLED, ROOT
from tests.reference.golden import load, load_bidirectional, read_cases
from tests.reference.renamed import rename_tokens

SWAPPED = {"sdar": {511: 100, 510: 37}, "llada": {511: 0, 510: 3}}
"""Mask and stop token change places with ordinary ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    sdar = sorted(
        (c for c in read_cases(BUNDLED / "sdar") if c["kwargs"]["block_length"] == 4),
        key=lambda case: 510 not in case["output_token_ids"],
    )
    llada = {c["name"] for c in read_cases(BUNDLED / "llada")["cases"] if c["cache"] == "dual"}
    names = {"sdar": {case["name"] for case in sdar[:40]}, "llada": set(sorted(llada)[::8])}
    for family, swapped in SWAPPED.items():
        rename_tokens(BUNDLED / family, folder / family, swapped, names[family])
    return folder


def test_the_mask_token_of_block_diffusion_comes_from_the_data(folder: Path) -> None:
    golden = load("sdar", folder)
    assert golden.mask_id == 100
    cases = [case for case in golden.cases if case.options.block_length == 4]
    outputs = generate(engine_of(golden, cases[0].options), [c.prompt for c in cases], [case_params(c) for c in cases])
    assert [(tokens_of(o), nfe_of(o)) for o in outputs] == [(c.tokens, c.nfe) for c in cases]
    assert any(37 in case.tokens for case in cases), "no case stops"


def test_the_mask_token_of_full_attention_comes_from_the_data(folder: Path) -> None:
    golden = load_bidirectional("llada", folder)
    cases = [c for c in golden.cases if c.options.verify == "none" and c.block_length == golden.cases[0].block_length]
    assert golden.mask_id == 0
    assert cases
    llm = full_attention.engine_of(golden, cases[0].options)
    outputs = generate(llm, [c.prompt for c in cases], [full_attention.params_of(c.options) for c in cases])
    assert [tokens_of(o) for o in outputs] == [c.tokens for c in cases]


def test_the_environment_names_the_folder_and_a_family_that_it_lacks_is_skipped(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "tests/reference", "-k", "logits_equal"]
    environment = {**os.environ, "VLLM_DLLM_GOLDEN": str(folder), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed, 4 skipped" in run.stdout
    assert f"no golden cases in {folder}/dream" in run.stdout or "dream" in run.stdout
