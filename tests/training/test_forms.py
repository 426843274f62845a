"""Answers in words, in JSON and as a tool call."""

import json
import re

import jsonschema
import pytest
from transformers import AutoTokenizer

from tests.paths import CHECKPOINTS
from vllm_dllm.tiny.arithmetic import make_problems
from vllm_dllm.tiny.forms import ANSWER_SCHEMA, TOOLS, in_form, in_forms, is_right
from vllm_dllm.tiny.text import render_prompt

PROBLEMS = make_problems(300, 0, "test")
JSON_CHECKPOINT = CHECKPOINTS / "tiny-sdar-json"


def test_words_are_left_as_they_are():
    assert [in_form(problem, "words") for problem in PROBLEMS] == PROBLEMS


def test_json_answers_conform_to_their_schema_and_hold_the_worked_steps():
    for problem in PROBLEMS:
        answer = json.loads(in_form(problem, "json").answer_text)
        jsonschema.Draft202012Validator(ANSWER_SCHEMA).validate(answer)
        assert answer["answer"] == problem.final_answer
        assert answer["steps"] == re.findall(r"\d+ [+*-] \d+ = \d+", problem.answer_text)


def test_calls_name_an_offered_tool_with_the_first_step_as_arguments():
    by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    results = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__}
    orders = set()
    for problem in PROBLEMS:
        asked = in_form(problem, "call")
        call = json.loads(asked.answer_text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        jsonschema.Draft202012Validator(by_name[call["name"]]).validate(call["arguments"])
        result = results[call["name"]](call["arguments"]["a"], call["arguments"]["b"])
        first = re.search(r"= (\d+)", problem.answer_text)
        assert first is not None
        assert result == int(first.group(1))
        assert set(asked.tools) == set(by_name)
        orders.add(asked.tools)
    assert len(orders) == 6, "the tools stand in every order"


def test_forms_take_turns():
    forms = [problem.form for problem in in_forms(PROBLEMS[:5], ("words", "json", "call"))]
    assert forms == ["words", "json", "call", "words", "json"]


@pytest.mark.parametrize("form", ["words", "json", "call"])
def test_the_answer_of_the_training_is_right_and_another_problems_is_not(form):
    one, other = (in_form(problem, form) for problem in PROBLEMS[:2])
    assert is_right(one.answer_text, one)
    assert not is_right(other.answer_text, one)


@pytest.mark.parametrize(
    "text", ["", "13", "[13]", '{"answer": "13"}', "<tool_call>\n[1]\n</tool_call>", "<tool_call>"]
)
@pytest.mark.parametrize("form", ["json", "call"])
def test_text_of_another_form_is_wrong_and_no_error(form, text):
    assert not is_right(text, in_form(PROBLEMS[0], form))


def test_the_chat_template_of_the_checkpoint_renders_tools_and_calls_as_in_training():
    tokenizer = AutoTokenizer.from_pretrained(JSON_CHECKPOINT)
    by_name = {tool["function"]["name"]: tool for tool in TOOLS}
    problem = in_form(PROBLEMS[0], "call")
    messages = [{"role": "user", "content": problem.question}]
    tools = [by_name[name] for name in problem.tools]
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert prompt == render_prompt(problem.question, problem.tools)
    call = json.loads(problem.answer_text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    messages.append({"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]})
    chat = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert chat == f"{prompt}{problem.answer_text}<|im_end|>\n"


def test_the_checkpoint_of_the_forms_is_small_enough_for_git():
    assert (JSON_CHECKPOINT / "model.safetensors").stat().st_size <= 5_500_000
