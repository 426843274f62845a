"""Every command of the pages is one that its program understands: its options, their values and its files."""

import functools
import importlib
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.paths import BENCHMARKS, ROOT
from vllm_dllm.commands.cli import app as vllm_dllm
from vllm_dllm.options.drafter import DrafterConfig
from vllm_dllm.options.errors import parse_options
from vllm_dllm.options.schema import parse_engine_options, parse_request_options
from vllm_dllm.options.speculative import lay_under_additional_config
from vllm_dllm.tiny.train import TinyArguments
from vllm_dllm.training.prefix_conditioned import FefArguments
from vllm_dllm.training.trainer import make_parser

from .blocks import BLOCKS, COMMANDS, Command

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_THE_READER = {"prompts.jsonl"}
"""Files that no test has; another file takes their place."""
NOT_YET = {"benchmarks/results/gpu.json"}
"""What the first measurement on a GPU writes."""
TRAINING = {
    "vllm_dllm.training.prefix_conditioned": FefArguments,
    "vllm_dllm.tiny.train": TinyArguments,
}
"""Commands whose options are transformers' and their own."""
AUTOREGRESSIVE = ("Qwen/", "checkpoints/tiny-qwen2")
"""Beginnings of the names of models that DEER drafts for."""


def check_typer(app: typer.Typer, words: list[str]) -> None:
    """Parse the words as the program would, and run nothing."""
    command: Any = typer.main.get_command(app)
    for each in [command, *getattr(command, "commands", {}).values()]:
        each.callback = None
    command.main(args=[__file__ if word in OF_THE_READER else word for word in words], standalone_mode=False)


def check_vllm(words: list[str]) -> None:
    if words[0] != "serve":
        assert words[:2] == ["bench", "serve"]  # tests/docs/test_clients.py runs it
        return
    arguments = serve_parser().parse_args(words[1:])
    model = arguments.model_tag
    assert not model.startswith("checkpoints/") or (ROOT / model / "config.json").is_file()
    speculative = dict(arguments.speculative_config or {})
    if arguments.spec_method:
        named = {"model": arguments.spec_model, "num_speculative_tokens": arguments.spec_tokens}
        speculative = {"method": arguments.spec_method, **{key: value for key, value in named.items() if value}}
    if model.startswith(AUTOREGRESSIVE):
        parse_options(DrafterConfig, speculative, "", "speculative_config")
    elif speculative:
        lay_under_additional_config(speculative, arguments.additional_config)
    else:
        parse_engine_options(arguments.additional_config)


@functools.cache
def serve_parser() -> FlexibleArgumentParser:
    load_general_plugins()
    return make_arg_parser(FlexibleArgumentParser())


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        return
    if words[0] == "-m":
        module = importlib.import_module(words[1])
        kind = TRAINING.get(words[1]) or getattr(module, "ARGUMENTS", {}).get(words[2])
        if kind is None:
            check_typer(module.app, words[2:])
        else:
            options = words[2 if words[1] in TRAINING else 3 :]
            make_parser(kind, options).parse_args(options)
        return
    assert (ROOT / words[0]).is_file()
    if words[0].startswith("benchmarks/"):
        sys.path.insert(0, str(BENCHMARKS))
        namespace = vars(importlib.import_module(Path(words[0]).stem))
        app = namespace.get("app")
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command()(namespace["main"])
        check_typer(app, words[1:])
    else:
        assert words[0].startswith("examples/")
        namespace = runpy.run_path(str(ROOT / words[0]), run_name="imported")
        if "app" in namespace:
            check_typer(namespace["app"], words[1:])


def check_pip(words: list[str]) -> None:
    """Extras that are asked for exist."""
    assert words[0] == "install"
    for word in words[1:]:
        if "[" in word:
            requirement = Requirement(word.replace(".[", "vllm-dllm[", 1))
            assert requirement.name != "vllm-dllm" or requirement.extras <= EXTRAS.keys()


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


def check_pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests/"):
            assert (ROOT / word.partition("::")[0]).exists(), word


def check_curl(words: list[str]) -> None:
    """Request options are valid. ``test_snippets.py`` sends the request."""
    assert any(word.startswith("http://localhost:8000/") for word in words)
    if "-d" in words:
        parse_request_options(json.loads(words[words.index("-d") + 1]).get("vllm_xargs"))


def check_files(words: list[str]) -> None:
    """For programs that may not be installed: files of the repository that are named are there."""
    for word in words:
        if (path := word.rpartition("=")[2]).startswith(("examples/", "checkpoints/", "docs/")):
            assert (ROOT / path).exists(), path


def check_docker(words: list[str]) -> None:
    """What follows the image's name goes to ``vllm serve``."""
    if words[0] == "run":
        check_vllm(["serve", *words[words.index("diffusion-server") + 1 :]])


def check_uv(words: list[str]) -> None:
    assert words[0] == "pip"
    check_pip(words[1:])


def check_lm_eval(words: list[str]) -> None:
    """The request options. ``test_clients.py`` sends the request that comes of them."""
    parse_request_options(json.loads(words[words.index("--gen_kwargs") + 1])["vllm_xargs"])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "uv": check_uv,
    "pytest": check_pytest,
    "python": check_python,
    "python3.12": check_python,
    "vllm": check_vllm,
    "vllm-dllm": lambda words: check_typer(vllm_dllm, words) if words != ["--version"] else None,
    "curl": check_curl,
    "docker": check_docker,
    "grep": check_files,
    "lm_eval": check_lm_eval,
    "prometheus": check_files,
    "torchrun": lambda words: check_python(words[words.index("-m") :]),
    "ray": check_files,
}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_understood(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    program, *words = command.words
    CHECKS[program.removeprefix(".venv/bin/")](words)


def test_a_command_with_a_wrong_option_is_noticed() -> None:
    with pytest.raises(Exception, match="--modle"):
        check_typer(vllm_dllm, ["demo", "--modle", "checkpoints/tiny-sdar"])
    with pytest.raises(Exception, match="'best' is not one of"):
        check_typer(vllm_dllm, ["demo", "--policy", "best"])
    with pytest.raises(ValueError, match="threshold=2"):
        check_vllm(["serve", "checkpoints/tiny-sdar", "--additional-config", '{"dllm": {"threshold": 2}}'])


def test_blocks_with_commands_say_that_they_are_commands() -> None:
    unmarked = [str(block) for block in BLOCKS if not block.language and first_word(block.text) in CHECKS]
    assert unmarked == []


def first_word(text: str) -> str:
    return text.split()[0].removeprefix(".venv/bin/")


PATH = re.compile(r"`((?:tests|benchmarks|examples|tools|docs|checkpoints|patches|vllm_dllm)/[\w./-]*)(?:::[^`]*)?`")


def named_paths() -> Iterator[tuple[str, str]]:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for path in PATH.findall(page.read_text(encoding="utf-8")):
            yield page.name, path


def test_files_that_the_pages_name_are_there() -> None:
    missing = {(page, path) for page, path in named_paths() if not (ROOT / path).exists()}
    assert {path for _, path in missing} <= NOT_YET, missing
