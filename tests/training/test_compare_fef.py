"""The comparison of LLaDA's decoding and FeF-DLLM's."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from vllm_dllm.training import compare_fef, tiny
from vllm_dllm.training.arithmetic import make_problems
from vllm_dllm.training.network import build_network
from vllm_dllm.training.text import render_prompt, train_tokenizer


@pytest.mark.parametrize("family", [tiny.LLADA, tiny.DREAM], ids=lambda family: family.name)
def test_every_checkpoint_and_policy_gets_a_row_with_its_forwards(family, tmp_path):
    tokenizer = train_tokenizer([render_prompt(p.question) + p.answer_text for p in make_problems(50, 0, "train")], 400)
    shape = replace(family.recipe.network, vocab_size=400, hidden_size=64, head_dim=16, num_hidden_layers=1)
    for name in ("before", "after"):
        torch.manual_seed(0)
        tiny.save_checkpoint(family, build_network(shape), tokenizer, tmp_path / name)
    out = tmp_path / "figures.json"
    arguments = ["--model", tmp_path / "before", "--tuned", tmp_path / "after", "--problems", 3, "--window", 32]
    result = CliRunner().invoke(compare_fef.app, [str(a) for a in (*arguments, "--out", out)])
    assert result.exit_code == 0, result.output
    results = json.loads(out.read_text())["results"]
    assert results["before"] == results["after"]  # the same weights
    rows = results["before"]
    assert [rows[f"low confidence, {n} token{'s' * (n > 1)} per step"]["forwards"] for n in (1, 2, 4)] == [32, 16, 8]
    # 32 positions and, of them, 16 again; a round takes one or two forwards and commits two or more but for the last.
    assert 4 <= rows["FeF, step=2"]["forwards"] <= 32 + 16 + 2
    assert 0 <= rows["FeF, step=2"]["accepted"] <= 1


def test_accuracy_counts_problems_whose_final_number_is_right():
    problems = make_problems(40, 0, "test")
    texts = [p.answer_text if n % 4 else "#### 99" for n, p in enumerate(problems)]
    tokenizer = train_tokenizer(texts + [render_prompt(p.question) for p in problems], 400)
    answers = {tuple(tokenizer.encode(render_prompt(p.question)).ids): t for p, t in zip(problems, texts, strict=True)}

    def policy(network, prompts):
        tokens = [tokenizer.encode(answers[tuple(prompt)]).ids for prompt in prompts]
        return compare_fef.Decoding(tokens, [3] * len(prompts), drafts=8, accepted=2)

    result = compare_fef.measure(None, tokenizer, problems, policy, "name")
    assert result == compare_fef.Result(accuracy=0.75, forwards=3.0, accepted=0.25)
