"""The command line: arguments, the table, and the demonstration itself."""

import json
import re
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import vllm
from rich.console import Console
from typer.testing import CliRunner

import vllm_dllm
from tests import warm
from tests.engine.harness import engine
from vllm_dllm.commands import cli, demo
from vllm_dllm.commands.engine import BUNDLED_MODEL, file_to_write, load_engine, timed_chat
from vllm_dllm.commands.prompts import read_prompts
from vllm_dllm.methods import VerifierName

VLLM_DLLM = Path(sys.executable).with_name("vllm-dllm")


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit status and output, without the boxes that Rich draws around messages, on one line."""
    result = CliRunner(env={"COLUMNS": "110"}).invoke(cli.app, arguments)
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def decoded(**changes: Any) -> demo.Decoded:
    values: dict[str, Any] = {
        "schedule": "threshold 0.9",
        "texts": ["3 + 4 = 7\n#### 7", "#### 1", "number % 2 == 0\n"],
        "tokens": 90,
        "nfe": 36,
        "seconds": 2.0,
        "grades": [True, False, None],
    }
    return demo.Decoded(**{**values, **changes})


def printed(renderable_to: Any) -> str:
    console = Console(width=110, record=True, file=StringIO())
    renderable_to(console)
    return console.export_text()


def test_version_names_the_program_and_vllm_with_their_versions() -> None:
    status, output = invoke("--version")
    assert status == 0
    # The CPU build is a distribution of another name, which has vLLM's, too, once the plugin is loaded.
    assert re.fullmatch(
        rf"vllm-dllm {vllm_dllm.__version__} vllm(-cpu)? {vllm.__version__.partition('+')[0]}\S* ", output
    )


def test_help_lists_the_options_of_the_demonstration() -> None:
    status, output = invoke("demo", "--help")
    assert status == 0
    for option in ("--model", "--prompt", "--policy", "--threshold", "--verify", "--max-tokens", "--live", "--url"):
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "--policy"),
        (["--threshold", "1.5"], "--threshold"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--url", "localhost:8000"], "--url.?: 'localhost:8000' begins with neither http:// nor https://"),
        (["--url", "http://localhost:99999"], "--url.?: 'http://localhost:99999': Port out of range 0-65535"),
        (["--policy", "entropy", "--threshold", "0.5"], "--threshold: policy 'entropy' has none"),
        (["--verify", "fef", "--policy", "static"], "--policy: verify 'fef' has none"),
        (["--verify", "fef", "--threshold", "0.5"], "--threshold: verify 'fef' has none"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "load_engine", lambda model: pytest.fail("the model was loaded"))
    status, output = invoke("demo", *arguments)
    assert status == 2
    assert re.search(f"Invalid value for .?{message}", output)


def test_without_the_bundled_model_the_user_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vllm_dllm.commands.engine.BUNDLED_MODEL", tmp_path / "absent")
    status, output = invoke("demo")
    assert status == 2
    assert "Invalid value for --model: there is no bundled model at" in output


@pytest.mark.parametrize("arguments", [("demo",), ("trace", "--model", "m", "--prompt", "p", "--out", "t.html")])
def test_without_vllm_the_user_is_told_what_to_install(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vllm_dllm.commands.engine.importlib.util.find_spec", lambda name: None)
    status, output = invoke(*arguments)
    assert status == 2
    assert "an engine needs vLLM: pip install 'vllm-dllm[cuda]' or 'vllm-dllm[cpu]'" in output


@pytest.mark.parametrize(("graph", "hint"), [(None, "--model"), ("graph.json", None)])
def test_a_model_is_not_blamed_for_a_draft_graph(
    graph: str | None, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_engine(model: str, **arguments: Any) -> Any:
        raise typer.BadParameter("it cannot be loaded", param_hint=arguments["hint"])

    monkeypatch.setattr("vllm_dllm.commands.engine.start_engine", start_engine)
    with pytest.raises(typer.BadParameter) as refused:
        load_engine("m", {"draft_graph": graph})
    assert refused.value.param_hint == hint


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_dllm.commands.engine.os.access", lambda path, mode: False)
    with pytest.raises(typer.BadParameter, match=r"graph\.json cannot be written"):
        file_to_write(tmp_path / "graph.json")


def test_lines_of_prompts_end_at_line_feeds_alone(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one\u2028two"}\r\n{"prompt": "three"}', encoding="utf-8")
    assert read_prompts(prompts) == ["one\u2028two", "three"]


def test_an_autoregressive_model_is_told_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that vLLM refuses options which it was given unasked."""

    def start_engine(model: str, hint: str, additional_config: dict[str, Any]) -> Any:
        assert (hint, additional_config) == ("--model", {"dllm": {}})
        return SimpleNamespace(model_config=SimpleNamespace(is_diffusion=False))

    monkeypatch.setattr("vllm_dllm.commands.engine.start_engine", start_engine)
    status, output = invoke("demo", "--model", "some/qwen")
    assert status == 2
    assert "some/qwen is not a diffusion language model" in output


def test_one_token_per_step_is_always_the_first_schedule() -> None:
    assert [*demo.make_schedules("threshold", None)] == ["static, k=1", "threshold 0.9"]
    assert [*demo.make_schedules("threshold", 0.5)] == ["static, k=1", "threshold 0.5"]
    assert [*demo.make_schedules("localleap", 0.8)] == ["static, k=1", "localleap 0.8"]
    assert [*demo.make_schedules("sequential", None)] == ["static, k=1", "sequential"]
    assert [*demo.make_schedules("static", None)] == ["static, k=1"]
    assert [*demo.make_schedules("threshold", None, "freedave")] == ["static, k=1", "threshold 0.9, freedave"]
    assert [*demo.make_schedules()] == ["static, k=1", "threshold 0.9"]
    assert demo.make_schedules(verify="fef")["fef"] == {"verify": "fef"}


@pytest.mark.parametrize("verify", ["none", "freedave", "fef"])
def test_a_schedule_leaves_no_verifier_to_the_server_that_is_asked(verify: VerifierName) -> None:
    first, second = demo.make_schedules(verify=verify).values()
    assert (first["verify"], second["verify"]) == ("none", verify)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "multi_block"], "policy='multi_block' is not allowed: this engine has windows of one block"),
        (["--verify", "linear_spec"], "verify='linear_spec' is not allowed: SDAR models"),
        (["--prompt", "one " * 2000], "maximum context length"),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_what_the_engine_refuses_is_said_in_a_sentence(
    arguments: list[str], message: str, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(BUNDLED_MODEL, skip_tokenizer_init=False, hf_overrides={}, max_model_len=256)
    monkeypatch.setattr(demo, "load_engine", lambda *_: llm)
    status, output = invoke("demo", *arguments, *["--live"] * live)
    assert status == 2
    assert message in output
    assert "Traceback" not in output


def test_a_model_with_a_verifier_of_its_own_decodes_with_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model, taken for one of I-DLM: its text is of no use."""
    for file in BUNDLED_MODEL.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    for name in ("block_length", "block_size"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_regular_causal": True}))
    llm = engine(tmp_path, skip_tokenizer_init=False, dllm={}, hf_overrides={}, max_model_len=256)
    monkeypatch.setattr(demo, "load_engine", lambda *_: llm)
    status, output = invoke("demo", "--prompt", "How many?", "--max-tokens", "5")
    assert status == 0, output
    assert re.search(r"tokens/s .* isd \d+ \d+ ", output)
    assert "static" not in output
    status, output = invoke("demo", "--policy", "static")
    assert (status, "verify 'isd' has none" in output) == (2, True)


def test_without_a_chat_template_a_question_is_the_beginning_of_a_text() -> None:
    llm = FakeEngine(chat_template=None)
    outputs, _ = timed_chat(llm, ["3 + 4 ="], 12)  # type: ignore[arg-type]
    assert llm.asked == ["3 + 4 ="]
    assert len(outputs) == 1


def test_table_gives_tokens_per_forward_and_per_second_and_accuracy_of_graded_prompts() -> None:
    output = printed(lambda console: console.print(demo.compare([decoded()])))
    (row,) = (line for line in output.splitlines() if "threshold 0.9" in line)
    assert re.findall(r"[^│\s]+(?: [^│\s]+)*", row) == ["threshold 0.9", "90", "36", "2.50", "45.0", "1/2"]


def test_table_has_no_speed_of_texts_that_were_drawn_meanwhile() -> None:
    output = printed(lambda console: console.print(demo.compare([decoded(seconds=None)])))
    assert "tokens/s" not in output
    assert "1/2" in output


def test_table_has_no_accuracy_column_when_nothing_can_be_graded() -> None:
    output = printed(lambda console: console.print(demo.compare([decoded(grades=[None])])))
    assert "tokens/s" in output
    assert "accuracy" not in output


def test_texts_are_printed_as_they_are_even_when_they_look_like_markup() -> None:
    prompts = [
        demo.Problem("Add [b]3[/b] and 4."),
        demo.Problem("List x."),
    ]
    result = decoded(texts=["a[/red] = 7", "[x for x in y]"], grades=[True, None])
    lines = printed(lambda console: demo.print_texts(console, prompts, result)).splitlines()
    assert lines[1:4] == ["Add [b]3[/b] and 4.", "a[/red] = 7", "right"]
    assert "[x for x in y]" in lines


class FakeEngine:
    """Stands in for ``vllm.LLM``: answers everything with ``#### 7``."""

    def __init__(self, chat_template: str | None = "of a model"):
        self.tokenizer = SimpleNamespace(chat_template=chat_template)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def generate(self, prompts: Sequence[str], params: Any, use_tqdm: bool) -> list[Any]:
        assert self.tokenizer.chat_template is None
        return self._answers(prompts, params)

    def chat(self, messages: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert self.tokenizer.chat_template
        return self._answers(messages, params)

    def _answers(self, messages: Sequence[Any], params: Any) -> list[Any]:
        self.asked = [*messages]
        self.seen = [params] * len(messages)
        token_ids = list(range(params.max_tokens))
        return [SimpleNamespace(outputs=[SimpleNamespace(text="#### 7", token_ids=token_ids)]) for _ in messages]


def test_decoding_measures_the_whole_batch_and_grades_what_can_be_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_dllm.commands.live.request_stats", lambda output: SimpleNamespace(nfe=4))
    llm = FakeEngine()
    prompts = demo.test_problems(demo.DEMO_PROBLEMS)
    (_, (schedule, options)) = demo.make_schedules("threshold", 0.5).items()
    result = demo.decode(llm, prompts, schedule, options, 12, None)  # type: ignore[arg-type]
    assert [params.extra_args for params in llm.seen] == [
        {"dllm_policy": "threshold", "dllm_threshold": 0.5, "dllm_verify": "none"}
    ] * len(prompts)
    assert (result.tokens, result.nfe) == (12 * len(prompts), 4 * len(prompts))
    assert result.texts == ["#### 7"] * demo.DEMO_PROBLEMS
    assert result.grades == [p.final_answer == 7 for p in prompts]


@pytest.mark.slow
@pytest.mark.skipif(not (BUNDLED_MODEL / "config.json").is_file(), reason="the bundled model is not there")
def test_demonstration_needs_fewer_forwards_in_parallel_than_one_token_per_step() -> None:
    result = warm.run([str(VLLM_DLLM), "demo"], timeout=300)
    assert result.returncode == 0, result.stderr
    rows = {
        cells[0]: cells
        for line in result.stdout.splitlines()
        if len(cells := re.findall(r"[^│\s]+(?: [^│\s]+)*", line)) == 6
    }
    assert int(rows["threshold 0.9"][2]) < int(rows["static, k=1"][2])
