"""What the commands share: options, checks, and vLLM inside of a command's own process, its log off the terminal."""

import importlib.util
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from vllm_dllm.methods import VERIFIER_ROWS, PolicyName, VerifierName
from vllm_dllm.options.schema import ENGINE_KEY, REQUEST_PREFIX

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
"""Small models trained on arithmetic problems. They are part of the repository, not of the wheel."""

BUNDLED_MODEL = CHECKPOINTS / "tiny-sdar"

CPU_KV_CACHE_BYTES = 1 << 30
"""On a CPU vLLM would otherwise claim most of the memory."""


ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Path or hub name of a diffusion language model. Default: the bundled one."),
]


def file_to_write(path: Path | None) -> Path | None:
    """Refuse a path that cannot be written, before anything expensive is done for it. For ``callback=``."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def picture_to_write(path: Path | None) -> Path | None:
    """`file_to_write` for a picture, which matplotlib draws."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("drawing needs matplotlib: pip install 'vllm-dllm[bench]'")
    return file_to_write(path)


def check_differ(**files: Path | None) -> None:
    """Refuse files, by their options, of which one would be written over another."""
    options: dict[Path, str] = {}
    for name, path in files.items():
        option = f"--{name.replace('_', '-')}"
        if path is not None and (other := options.setdefault(path.resolve(), option)) != option:
            raise typer.BadParameter(f"{path} is the file of {other}", param_hint=option)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that cannot be written is for the user to put right: ``typer.BadParameter``."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror or error}") from error


def check_policy_is_used(verify: VerifierName, policy: PolicyName | None, threshold: float | None) -> None:
    """Refuse a policy, or what belongs to one, beside a verifier that decides itself what a step unmasks."""
    for value, hint in ((policy, "--policy"), (threshold, "--threshold")):
        if value is not None and not VERIFIER_ROWS[verify].uses_policy:
            raise typer.BadParameter(f"verify {verify!r} has none", param_hint=hint)


def request_options(**options: Any) -> dict[str, Any]:
    """``extra_args`` of a request: the options that are given, with their prefix."""
    return {f"{REQUEST_PREFIX}{name}": value for name, value in options.items() if value is not None}


def make_table(headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None = None) -> Table:
    """A table of numbers behind a first column of names."""
    table = Table(caption=caption)
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table


@contextmanager
def refusals() -> Iterator[None]:
    """What the engine refuses of a request is for the user to put right: ``typer.BadParameter``."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VLLMValidationError as error:
        raise typer.BadParameter(str(error)) from error


def timed_chat(
    llm: "LLM", questions: Sequence[str], max_tokens: int, extra_args: dict[str, Any] | None = None
) -> "tuple[list[RequestOutput], float]":
    """Greedy answers to all questions as one batch, and the seconds they took.

    Without a chat template a question is the beginning of a text.

    The batch first runs for one token per question: nobody pays for first use, and all find their prompts in the
    prefix cache.
    """
    from vllm import SamplingParams

    prompts: Any = list(questions)
    answer = llm.generate
    if llm.get_tokenizer().chat_template:
        answer, prompts = llm.chat, [[{"role": "user", "content": question}] for question in questions]
    for limit in (1, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=limit, extra_args=extra_args)
        start = time.perf_counter()
        outputs = answer(prompts, params, use_tqdm=False)
    return outputs, time.perf_counter() - start


def start_engine(model: str, *, hint: str | None = "--model", **arguments: Any) -> "LLM":
    """Start vLLM.

    Args:
        model: path or hub name.
        hint: the option that named it; ``None``: it may be another that cannot be met.
        arguments: of `vllm.LLM`.

    Raises:
        typer.BadParameter: the model or its tokenizer cannot be loaded, or there is no vLLM; says why.
    """
    if importlib.util.find_spec("vllm") is None:
        raise typer.BadParameter("an engine needs vLLM: pip install 'vllm-dllm[cuda]' or 'vllm-dllm[cpu]'")
    if model.startswith(("/", ".")) and not Path(model).is_dir():
        raise typer.BadParameter(f"there is no folder {model}", param_hint=hint)
    # vLLM and torch read these when they are imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    try:
        return LLM(
            model,
            max_model_len=-1,  # as much as the KV cache has room for
            enforce_eager=on_cpu,  # compiling takes longer than a few prompts
            kv_cache_memory_bytes=CPU_KV_CACHE_BYTES if on_cpu else None,
            use_tqdm_on_load=False,
            **arguments,
        )
    except (OSError, ValueError) as error:
        # Whatever is wrong with the files of a model ends up as one of these.
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        reason = reason.removeprefix("Value error, ")
        raise typer.BadParameter(f"{model} cannot be loaded: {reason}", param_hint=hint) from error


def load_engine(model: str, options: dict[str, Any] | None = None) -> "LLM":
    """Start vLLM with a diffusion model.

    Args:
        model: path or hub name.
        options: engine options of this plugin.

    Raises:
        typer.BadParameter: the model or its tokenizer cannot be loaded, or it is no diffusion model.
    """
    # Options without a value are left out. vLLM refuses any option of ours for an autoregressive model, and its message
    # would come before the one below.
    given = {key: value for key, value in (options or {}).items() if value}
    hint = None if "draft_graph" in given else "--model"
    llm = start_engine(model, hint=hint, additional_config={ENGINE_KEY: given})
    if not llm.model_config.is_diffusion:
        raise typer.BadParameter(f"{model} is not a diffusion language model", param_hint="--model")
    return llm


def bundled_model() -> str:
    """Return the path of the bundled diffusion model.

    Raises:
        typer.BadParameter: the installation has no checkpoints.
    """
    if not (BUNDLED_MODEL / "config.json").is_file():
        raise typer.BadParameter(
            f"there is no bundled model at {BUNDLED_MODEL}; name one, or install from a checkout", param_hint="--model"
        )
    return str(BUNDLED_MODEL)
