"""The bundled model answers what the pages and the examples ask it."""

import re

import pytest
from vllm import LLM, SamplingParams

from tests.engine.shared import shared_engine
from tests.paths import CHECKPOINTS, ROOT
from vllm_dllm.commands.problems import grade

pytestmark = pytest.mark.slow

PLACES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
QUESTION = re.compile(r"Ada has (\d+) apples\. Ben gives Ada (\d+) more\. How many apples does Ada have now\?")
ASKED = sorted(
    {
        match[0]: int(match[1]) + int(match[2])
        for place in PLACES
        for match in QUESTION.finditer(place.read_text(encoding="utf-8"))
    }.items()
)


@pytest.mark.parametrize("args", [{"dllm_policy": "static"}, {"dllm_policy": "threshold", "dllm_threshold": 0.9}])
def test_questions_of_the_pages_are_answered_right(args: dict[str, object]) -> None:
    assert len(ASKED) > 1
    llm = shared_engine(
        "answers",
        lambda: LLM(
            str(CHECKPOINTS / "tiny-sdar"), max_model_len=512, kv_cache_memory_bytes=64 << 20, enforce_eager=True
        ),
    )
    chats = [[{"role": "user", "content": question}] for question, _ in ASKED]
    params = SamplingParams(temperature=0, max_tokens=64, extra_args=args)
    outputs = llm.chat(chats, params, use_tqdm=False)  # type: ignore[arg-type]
    for (question, answer), output in zip(ASKED, outputs, strict=True):
        assert grade(output.outputs[0].text, answer), (question, output.outputs[0].text)
