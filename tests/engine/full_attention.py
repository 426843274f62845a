"""What the tests of models with full attention share."""

from typing import Any

from vllm import LLM, SamplingParams

from tests.engine.harness import engine, greedy, read_by_policy
from tests.paths import BUNDLED
from tests.reference.bidirectional import Options
from tests.reference.golden import BidirectionalGolden, golden_or_skip, load_bidirectional

FAMILIES = ("llada", "dream")


def golden(family: str) -> BidirectionalGolden:
    """Golden data of a family, of the folder that ``VLLM_DLLM_GOLDEN`` names; skips the test where there is none."""
    return golden_or_skip(load_bidirectional, family)


def bundled(family: str) -> BidirectionalGolden:
    """Golden data of a family in the repository."""
    return load_bidirectional(family, BUNDLED)


def engine_of(
    model: str | BidirectionalGolden, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any
) -> LLM:
    """Engine for requests with these options. Those that a request may set are left to the request.

    Args:
        model: golden data, or a family of the repository's.
        dllm: further engine options of ours.
    """
    fixed: dict[str, Any] = {"block_length": options.block_length, "cache": options.cache}
    if options.refresh_interval is not None:
        fixed["refresh_interval"] = options.refresh_interval
    if options.generation_window is not None:
        fixed["generation_window"] = options.generation_window
    checkpoint = (bundled(model) if isinstance(model, str) else model).checkpoint
    more = {"max_num_seqs": 16, "hf_overrides": {"mask_token_id": options.mask_id}, **more}
    return engine(checkpoint, dllm={**fixed, **(dllm or {})}, **more)


def drafting_engine(
    model: str | BidirectionalGolden, options: Options, *, dllm: dict[str, Any] | None = None, **more: Any
) -> LLM:
    """The same with room for drafts."""
    return engine_of(model, options, dllm={"max_drafts": 7, **(dllm or {})}, **{"max_num_seqs": 8, **more})


def request_options(options: Options) -> dict[str, Any]:
    """A reference decoder's options as ``extra_args`` of a request."""
    args: dict[str, Any] = {
        "dllm_policy": options.policy,
        "dllm_threshold": options.threshold,
        "dllm_factor": options.factor,
        "dllm_verify": options.verify,
    }
    if options.steps is not None and options.policy not in ("threshold", "factor"):
        args["dllm_steps"] = options.steps
    if options.top_k is not None:
        args["dllm_confidence_top_k"] = options.top_k
    if options.verify == "freedave":
        args |= {"dllm_drafts": options.drafts, "dllm_match": options.match}
    return read_by_policy(args, timesteps=True)


def params_of(options: Options, **more: Any) -> SamplingParams:
    """Greedy parameters of a request that fills its window."""
    return greedy(**{"max_tokens": options.gen_length, "extra_args": request_options(options), **more})
