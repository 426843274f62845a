"""The generated word problems and their grader."""

import re
import subprocess
import sys

import pytest

from vllm_dllm.commands import problems
from vllm_dllm.commands.problems import grade
from vllm_dllm.tiny.arithmetic import SPLITS, make_problems, split_of


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_problems(split):
    assert make_problems(50, 7, split) == make_problems(50, 7, split)
    assert make_problems(50, 7, split) != make_problems(50, 8, split)


def test_a_longer_list_begins_with_the_shorter_one():
    assert make_problems(80, 0, "test")[:30] == make_problems(30, 0, "test")


def test_splits_are_disjoint_whatever_their_seeds():
    train = {problem.question for seed in range(5) for problem in make_problems(1000, seed, "train")}
    test = {problem.question for seed in range(5) for problem in make_problems(1000, seed, "test")}
    assert not train & test
    assert {split_of(question) for question in train} == {"train"}
    assert {split_of(question) for question in test} == {"test"}


def test_questions_of_one_list_are_distinct():
    questions = [problem.question for problem in make_problems(2000, 0, "train")]
    assert len(set(questions)) == len(questions)


def test_long_wordings_have_the_same_questions_and_steps_and_one_answer_each():
    short, long = (make_problems(200, 0, "test", wording) for wording in ("short", "long"))
    assert long == make_problems(300, 0, "test", "long")[:200]
    for one, other in zip(short, long, strict=True):
        assert (one.question, one.final_answer) == (other.question, other.final_answer)
        assert grade(other.answer_text, one.final_answer)
        terms = r"(\d+ [+*-] \d+) (?:=|is|makes|gives) (\d+)"
        assert re.findall(terms, other.answer_text) == re.findall(terms, one.answer_text)
        assert len(other.answer_text) > len(one.answer_text)


def test_every_worked_step_is_right_and_leads_to_the_final_answer():
    for problem in make_problems(500, 0, "test"):
        steps = re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)", problem.answer_text)
        results = [{"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] for a, op, b, _ in steps]
        assert results == [int(result) for *_, result in steps]
        assert results[-1] == problem.final_answer
        assert 1 <= problem.final_answer <= 20


def test_numbers_of_the_worked_steps_come_from_the_question():
    for problem in make_problems(500, 1, "train"):
        given = {int(number) for number in re.findall(r"\d+", problem.question)}
        steps = re.findall(r"(\d+) [+*-] (\d+) = (\d+)", problem.answer_text)
        known = set(given)
        for a, b, result in steps:
            assert {int(a), int(b)} <= known
            known.add(int(result))


def test_the_worked_answer_of_every_problem_passes_the_grader():
    assert all(grade(problem.answer_text, problem.final_answer) for problem in make_problems(200, 3, "test"))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("#### 42", True),
        ("so 40 + 2 = 42.\n####42<|im_end|>", True),
        ("#### 42 #### 7", True),
        ("#### 7 #### 42", False),
        ("#### 420", False),
        ("#### -42", False),
        ("the answer is 42", False),
        ("", False),
    ],
)
def test_only_the_first_marked_number_counts(text, right):
    assert grade(text, 42) is right


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match="split='dev' is not allowed: it must be one of train, test"):
        make_problems(1, 0, "dev")


def test_problems_can_be_made_without_loading_torch():
    code = "import sys, vllm_dllm.tiny.arithmetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_problems_that_the_commands_ship_are_the_first_of_their_splits():
    assert problems.train_questions(200) == [problem.question for problem in make_problems(200, 0, "train")]
    shipped = [(problem.question, problem.final_answer) for problem in problems.test_problems(8)]
    assert shipped == [(problem.question, problem.final_answer) for problem in make_problems(8, 0, "test")]
