"""Structured outputs of a model that was trained on their forms: right answers, in few forwards."""

from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.paths import CHECKPOINTS
from vllm_dllm.observe.stats import request_stats
from vllm_dllm.tiny.arithmetic import make_problems
from vllm_dllm.tiny.forms import ANSWER_SCHEMA, TOOLS, Form, in_form, is_right

CALL = r'<tool_call>\n\{"name": "(add|subtract|multiply)", "arguments": \{"a": \d{1,2}, "b": \d{1,2}\}\}\n</tool_call>'
CONSTRAINTS: dict[Form, dict[str, Any]] = {"json": {"json": ANSWER_SCHEMA}, "call": {"regex": CALL}}
ARGS = {"dllm_policy": "threshold", "dllm_threshold": 0.9}


@pytest.fixture
def llm() -> LLM:
    return LLM(
        str(CHECKPOINTS / "tiny-sdar-json"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 25,
        enforce_eager=True,
        structured_outputs_config={"backend": "xgrammar"},
    )


@pytest.mark.slow
def test_constrained_answers_are_at_least_as_often_right_and_several_tokens_to_a_forward(
    llm: LLM,
) -> None:
    for form, constraint in CONSTRAINTS.items():
        problems = [in_form(problem, form) for problem in make_problems(40, 1, "test")]
        chats: Any = [[{"role": "user", "content": problem.question}] for problem in problems]
        right = {}
        for asked in (None, StructuredOutputsParams(**constraint)):
            params = SamplingParams(temperature=0, max_tokens=96, structured_outputs=asked, extra_args=ARGS)
            outputs = llm.chat(chats, params, tools=TOOLS if form == "call" else None, use_tqdm=False)
            right[asked is not None] = sum(
                is_right(output.outputs[0].text, problem) for output, problem in zip(outputs, problems, strict=True)
            )
        stats = [request_stats(output) for output in outputs]
        assert right[True] >= right[False] >= len(problems) * 0.4
        assert sum(each.committed_tokens for each in stats) >= 2.5 * sum(each.nfe for each in stats)
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
