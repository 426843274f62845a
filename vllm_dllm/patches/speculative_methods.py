"""Speculative methods that a model implements itself (``patches/006-model-speculative-methods.diff``).

vLLM's ``SpeculativeConfig`` describes a drafter beside the model, and the parser knows all of its methods. A
diffusion model that verifies drafts of its own takes over what ``--speculative-config`` asks for.
"""

import argparse
import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from vllm_dllm.patches.original import VllmChangedError, mentions, of_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

MARKER = "resolve_speculative_config"

REGISTRY = "SPECULATIVE_METHODS"
"""In ``vllm.config.speculative``: methods of plugins, see `draft_model_speculators`."""


def apply() -> bool:
    """Change how ``EngineArgs`` parses and resolves ``speculative_config``; False where vLLM has the change."""
    from vllm.config import speculative
    from vllm.engine.arg_utils import EngineArgs

    create = of_vllm(EngineArgs, "create_speculative_config", ("self", "target_model_config", "target_parallel_config"))
    add_arguments = of_vllm(EngineArgs, "add_cli_args", ("parser",))
    if mentions(create, MARKER):
        return False

    @functools.wraps(create)
    def create_speculative_config(
        self: "EngineArgs", target_model_config: "ModelConfig", target_parallel_config: "ParallelConfig"
    ) -> "SpeculativeConfig | None":
        asked = asked_of(self)
        resolve = getattr(target_model_config.hf_config, MARKER, None)
        if asked is not None and resolve is not None:
            self.additional_config = resolve(asked, self.additional_config)
            return None
        method = None if asked is None else asked.get("method")
        allowed = (*get_args(speculative.SpeculativeMethod), *getattr(speculative, REGISTRY, ()))
        if method is not None and method not in allowed:
            raise ValueError(
                f"Speculative method {method!r} is not implemented by {target_model_config.architecture}. "
                f"Allowed: {', '.join(allowed)}"
            )
        # vLLM adds its aliases to what it is given, and other API servers start from the same arguments.
        self.speculative_config = copy.copy(_spelled_out(self.speculative_config))
        return create(self, target_model_config, target_parallel_config)

    @functools.wraps(add_arguments)
    def add_cli_args(parser: "FlexibleArgumentParser") -> "FlexibleArgumentParser":
        parser = add_arguments(parser)
        config, method = _option(parser, "--speculative-config"), _option(parser, "--spec-method")
        config.type = functools.partial(_json_or_method, config.type)
        # The engine validates the name; the help goes on listing vLLM's own.
        method.metavar, method.choices = method.choices, None
        return parser

    EngineArgs.create_speculative_config = create_speculative_config
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    return True


def asked_of(args: "EngineArgs") -> dict[str, Any] | None:
    """``speculative_config`` with the options that are short for its keys."""
    config = _spelled_out(args.speculative_config)
    for flag, key, value in (
        ("--spec-method", "method", args.spec_method),
        ("--spec-model", "model", args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", args.spec_tokens),
    ):
        if value is None:
            continue
        if config is not None and key in config:
            raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
        config = {**(config or {}), key: value}
    return None if config is None else {key.replace("-", "_"): value for key, value in config.items()}


def _spelled_out(config: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A method's bare name is short for ``{"method": name}``."""
    return {"method": config} if isinstance(config, str) else config


def _json_or_method(parse_json: Callable[[str], Any], text: str) -> Any:
    """``--speculative-config`` on the command line."""
    try:
        return parse_json(text)
    except argparse.ArgumentTypeError:
        if text.isidentifier():
            return {"method": text}
        raise


def _option(parser: argparse.ArgumentParser, flag: str) -> Any:
    option = parser._option_string_actions.get(flag)
    if option is None:
        raise VllmChangedError(f"vllm-dllm changes the option {flag}, which is gone in the installed vLLM")
    return option
