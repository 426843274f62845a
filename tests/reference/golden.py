"""The golden data: outputs of the official implementations on tiny checkpoints, in this project's terms.

``load(family)`` gives the cases that block-diffusion decoding must reproduce; ``Golden.skipped`` says why the
others are not among them. ``load_freedave()`` gives those that draft and verify, ``load_bidirectional(family)`` all of
the families with full attention. What each official option means here:

==================  =================================  ==================================================
sampler             official options                   ours
==================  =================================  ==================================================
SDAR ``oc-``        denoising_steps, threshold         denoising_steps; ``static`` if threshold is 1,
                                                       else ``threshold``
SDAR ``gen-``       remasking_strategy,                ``static``, ``sequential`` or ``threshold``, with
                    denoising_steps,                   denoising_steps and threshold
                    confidence_threshold
JetEngine ``jet-``  entropy_bounded, eb_threshold      ``entropy``, entropy_bound
FreeDave ``fd-``    confidence_threshold, alg_temp     ``threshold`` (inclusive), one token per step;
                                                       without a threshold ``static``, or ``sequential``
                                                       where alg_temp is -1
LLaDA2.0 ``g20-``   steps, gen_length, minimal_topk,   denoising_steps = min(steps, gen_length //
                    threshold                          minimal_topk), ``threshold``
LLaDA2.1 ``g21-``   num_to_transfer, threshold,        tokens_per_step, ``threshold``, edit_threshold,
                    editing_threshold, max_post_steps  max_post_edit_steps
Fast-dLLM v2        block_size, small_block_size,      block_length, sub_block_length, ``threshold`` with
                    threshold                          one token per step, logits shifted
LLaDA               steps, gen_length, threshold,      steps, gen_length; ``threshold`` or ``factor`` where
                    factor                             given, else ``static``
Dream, whole        alg, steps, max_new_tokens,        one block; ``maskgit_plus``, ``topk_margin``, ``entropy``,
                    threshold, top_k                   or ``paced`` for confidence_threshold
Dream, blocks       alg, steps, threshold              ``threshold`` for confidence_threshold, else ``entropy``
FreeDave on both    confidence_threshold,              ``threshold`` or ``static``; drafts, the subset rule,
                    draft_steps, early_exit            early_exit with eos
==================  =================================  ==================================================
"""

import functools
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.paths import GOLDEN

from . import bidirectional
from .bidirectional import BidirectionalModel, Decoded
from .decode import Commit, Options, cut

FAMILIES = ("sdar", "llada2_moe", "fast_dllm_v2")
BIDIRECTIONAL_FAMILIES = ("llada", "dream")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of an official sampler.

    Attributes:
        tokens: what our decoding outputs for ``max_new_tokens`` (cut there and after the first stop token).
        canvas: everything the official sampler decided after the prompt, to the end of its last block; None
            where it returned less than that.
        nfe: its denoising forwards, and for shifted families those that store a block, as they yield a token.
        steps: tokens written by each denoising forward.
        carried: first tokens of blocks that came from the forward of the block before.
    """

    name: str
    prompt: list[int]
    max_new_tokens: int
    options: Options
    tokens: list[int]
    canvas: list[int] | None
    nfe: int
    steps: list[list[Commit]]
    carried: list[Commit] = field(default_factory=list)


@dataclass(frozen=True)
class Golden:
    """Golden data of one family. ``skipped`` maps names of cases that do not apply to the reason."""

    checkpoint: Path
    logits: list[tuple[Tensor, int, Tensor]]
    """(input ids [T], block length, logits [T, V]) of uncached forwards under the block-causal mask."""
    cases: list[Case]
    skipped: dict[str, str]

    @property
    def mask_id(self) -> int:
        """The checkpoint's mask token, which its own configuration may leave out."""
        (mask_id,) = {case.options.mask_id for case in self.cases}
        return mask_id


@dataclass(frozen=True, kw_only=True)
class FreeDaveCase(Case):
    """One run of the official FreeDave on SDAR's checkpoint.

    ``nfe`` counts verifying forwards and the first of each block. ``steps`` are what the official code writes after
    each forward that accepts something, which is what ours had written one step before.

    Attributes:
        draft_steps: d, the block as it stands included.
        match: what a draft has to be to the next state of the one before.
        eager: drafts reach into the blocks after the current one.
        verifications: number of drafts and the accepted one for each verifying forward, as the official code counts
            them: draft 0 is our block as it stands, and the last one may leave no mask.
    """

    draft_steps: int
    match: Literal["exact", "subset"]
    eager: bool
    verifications: list[tuple[int, int]]


def read_cases(folder: Path) -> Any:
    """What ``cases.json`` of a family's folder holds, plain or compressed (``cases.json.gz``, ``cases.json.xz``).

    Raises:
        FileNotFoundError: the folder has none of the three.
    """
    for name, read in (("cases.json", open), ("cases.json.gz", gzip.open), ("cases.json.xz", lzma.open)):
        if (folder / name).is_file():
            with read(folder / name, "rt") as file:
                return json.load(file)
    raise FileNotFoundError(f"no golden cases in {folder} (cases.json, cases.json.gz or cases.json.xz)")


Loaded = TypeVar("Loaded")


def golden_or_skip(load: Callable[..., Loaded], *arguments: Any) -> Loaded:
    """What ``load`` returns; skips the test where ``VLLM_DLLM_GOLDEN`` names a folder that lacks the family."""
    try:
        return load(*arguments)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def load_freedave(folder: Path = GOLDEN) -> list[FreeDaveCase]:
    """The official runs with drafts, all on the checkpoint of ``load("sdar")``.

    Raises:
        FileNotFoundError: the golden data is not there.
    """
    return [_freedave(raw) for raw in read_cases(folder / "sdar") if "draft_steps" in raw["kwargs"]]


@functools.cache
def load(family: str, folder: Path = GOLDEN) -> Golden:
    """Golden data of one of ``FAMILIES``; the same object whenever it is asked for.

    Args:
        folder: has a folder per family.

    Raises:
        FileNotFoundError: the golden data is not there.
    """
    folder = folder / family
    tensors = load_file(folder / "logits.safetensors")
    logits = [
        (
            tensors[f"input_ids_{j}"].flatten().long(),
            int(tensors[f"block_length_{j}"]),
            tensors[f"logits_{j}"],
        )
        for j in range(3)
    ]
    convert = {"sdar": _sdar, "llada2_moe": _llada2, "fast_dllm_v2": _fast_dllm_v2}[family]
    cases, skipped = [], {}
    for raw in read_cases(folder):
        converted = convert(raw)
        if isinstance(converted, str):
            skipped[raw["name"]] = converted
        else:
            cases.append(converted)
    return Golden(folder / "checkpoint", logits, cases, skipped)


def _sdar(raw: dict[str, Any]) -> Case | str:
    kwargs, sampler = raw["kwargs"], raw["name"].split("-")[0]
    block_length, mask_id = kwargs["block_length"], kwargs.get("mask_id", kwargs.get("mask_token_id"))
    schedule = {"block_length": block_length, "mask_id": mask_id}
    if sampler == "oc":
        max_new_tokens, stop_ids = kwargs["gen_length"], kwargs["stopping_criteria_idx"]
        dynamic = kwargs["threshold"] < 1.0
        options = Options(
            **schedule,
            policy="threshold" if dynamic else "static",
            threshold=kwargs["threshold"],
            denoising_steps=kwargs["denoising_steps"],
            stop_ids=frozenset(stop_ids),
        )
    elif sampler == "gen":
        max_new_tokens, stop_ids = kwargs["gen_length"], kwargs["stopping_criteria_idx"]
        options = Options(
            **schedule,
            policy={
                "sequential": "sequential",
                "low_confidence_static": "static",
                "low_confidence_dynamic": "threshold",
            }[kwargs["remasking_strategy"]],
            threshold=kwargs.get("confidence_threshold", 1.0),
            denoising_steps=kwargs["denoising_steps"],
            stop_ids=frozenset(stop_ids or ()),
        )
    elif sampler == "jet":
        if "leftfallback" in raw["name"]:
            return "JetEngine's threshold policy falls back to the leftmost masks, not the most confident ones"
        max_new_tokens = kwargs["max_tokens"]
        options = Options(
            **schedule,
            policy="entropy",
            entropy_bound=kwargs["eb_threshold"],
            stop_ids=frozenset(kwargs["stop_words"] or ()),
        )
    else:
        if "draft_steps" in kwargs:
            return "drafts and verifies (FreeDave)"
        if kwargs["early_exit"]:
            return "FreeDave ends after a block that holds nothing but stop tokens"
        if kwargs["confidence_threshold"] is not None and kwargs["alg_temp"] == -1:
            return "FreeDave unmasks the leading run above the threshold; no policy here does"
        max_new_tokens, options = kwargs["max_gen_length"], _freedave_options(kwargs)
    canvas = raw["output_token_ids"]
    return Case(
        name=raw["name"],
        prompt=raw["prompt_token_ids"],
        max_new_tokens=max_new_tokens,
        options=options,
        tokens=cut(canvas[:max_new_tokens], options.stop_ids),
        canvas=canvas,
        nfe=raw["nfe_denoise"],
        steps=_commits(raw["steps"]),
    )


def _freedave_options(kwargs: dict[str, Any]) -> Options:
    threshold = kwargs["confidence_threshold"]
    return Options(
        block_length=kwargs["block_length"],
        mask_id=kwargs["mask_token_id"],
        policy="threshold" if threshold is not None else "sequential" if kwargs["alg_temp"] == -1 else "static",
        threshold=1.0 if threshold is None else threshold,
        threshold_inclusive=True,
    )


def _freedave(raw: dict[str, Any]) -> FreeDaveCase:
    kwargs, canvas = raw["kwargs"], raw["output_token_ids"]
    return FreeDaveCase(
        name=raw["name"],
        prompt=raw["prompt_token_ids"],
        max_new_tokens=kwargs["max_gen_length"],
        options=_freedave_options(kwargs),
        tokens=canvas[: kwargs["max_gen_length"]],
        canvas=canvas,
        nfe=raw["nfe_denoise"],
        steps=_commits(raw["steps"]),
        draft_steps=kwargs["draft_steps"],
        match="subset" if kwargs["match_rule"] == "subset" else "exact",
        eager=kwargs["eager_acceptance_mode"],
        verifications=[(drafts, accepted) for drafts, accepted in raw["verifications"]],
    )


def _llada2(raw: dict[str, Any]) -> Case | str:
    if _fills_masks_before_the_stop_token_later(raw):
        return "LLaDA2.0 ends inside a block only in the very step that writes the stop token"
    kwargs, max_new_tokens = raw["kwargs"], raw["kwargs"]["gen_length"]
    shared = {
        "block_length": kwargs["block_length"],
        "mask_id": kwargs["mask_id"],
        "threshold": kwargs["threshold"],
    }
    if raw["name"].startswith("g20"):
        options = Options(
            **shared,
            denoising_steps=min(kwargs["steps"], max_new_tokens // kwargs["minimal_topk"]),
            stop_ids=frozenset({kwargs["eos_id"]}),
            eos_early_stop=kwargs["eos_early_stop"],
        )
    else:
        # LLaDA2.1 only looks for the stop token when asked to, and then only after whole blocks.
        options = Options(
            **shared,
            tokens_per_step=kwargs["num_to_transfer"],
            edit_threshold=kwargs["editing_threshold"],
            max_post_edit_steps=kwargs["max_post_steps"],
            stop_ids=frozenset({kwargs["eos_id"]} if kwargs["eos_early_stop"] else ()),
        )
    canvas = raw["canvas_token_ids"]
    return Case(
        name=raw["name"],
        prompt=raw["prompt_token_ids"],
        max_new_tokens=max_new_tokens,
        options=options,
        tokens=cut(canvas[:max_new_tokens], options.stop_ids),
        canvas=canvas,
        nfe=raw["nfe_denoise"],
        steps=_commits(raw["steps"]),
    )


def _fills_masks_before_the_stop_token_later(raw: dict[str, Any]) -> bool:
    """Whether a step after the one that writes the first stop token of an LLaDA2.0 run fills a position before it.

    The official sampler, asked to end at the stop token, then finishes the block. Ours ends with that later step.
    """
    kwargs = raw["kwargs"]
    if not (raw["name"].startswith("g20") and kwargs["eos_early_stop"]):
        return False
    filled_in = {position: step for step, commits in enumerate(raw["steps"]) for position, _ in commits}
    stops = [p for commits in raw["steps"] for p, token in commits if token == kwargs["eos_id"]]
    if not stops:
        return False
    stop = min(stops)
    last_of_block = max(
        s for p, s in filled_in.items() if p // kwargs["block_length"] == stop // kwargs["block_length"]
    )
    last_before = max((step for position, step in filled_in.items() if position < stop), default=-1)
    return filled_in[stop] < last_before < last_of_block


def _fast_dllm_v2(raw: dict[str, Any]) -> Case | str:
    kwargs, prompt, tokens = raw["kwargs"], raw["prompt_token_ids"], raw["output_token_ids"]
    if kwargs["use_block_cache"]:
        return "caches inside the block, which is an approximation"
    block_length = kwargs["block_size"]
    # Whole blocks from the start of the prompt's last, unfinished one, and one token of the block after them.
    max_new_tokens = kwargs["max_new_tokens"] // block_length * block_length - len(prompt) % block_length + 1
    options = Options(
        block_length=block_length,
        mask_id=kwargs["mask_id"],
        threshold=kwargs["threshold"],
        sub_block_length=kwargs["small_block_size"],
        shifted=True,
        stop_ids=frozenset({kwargs["stop_token"]}),
        eos_early_stop=raw["name"].startswith("gen"),
    )
    return Case(
        name=raw["name"],
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        options=options,
        tokens=tokens,
        canvas=tokens if len(tokens) == max_new_tokens else None,
        nfe=raw["nfe_denoise"] + raw["nfe_store"],
        steps=_commits(raw["steps"]),
        carried=_commits([raw["tokens_from_store_or_prefill_logits"]])[0],
    )


def _commits(steps: list[list[list[int]]]) -> list[list[Commit]]:
    return [sorted((position, token) for position, token in step) for step in steps]


@dataclass(frozen=True, kw_only=True)
class BidirectionalCase:
    """One run of an official sampler on a model with full attention.

    Attributes:
        tokens: the whole window.
        nfe: its forwards.
        steps: what each forward wrote; of FreeDave, what was written whenever a draft was accepted.
        nfe_at_first: forwards of the first release of Fast-dLLM (LLaDA with a cache), which has a forward follow every
            refresh; None where it was not run.
        baseline_nfe: FreeDave's forwards without drafts; None for other cases.
        same_as_baseline: its drafts changed no token.
    """

    name: str
    group: str
    """What it is a case of: sampler, cache and mode."""
    prompt: list[int]
    options: bidirectional.Options
    tokens: list[int]
    nfe: int
    steps: list[list[Commit]]
    nfe_at_first: int | None
    baseline_nfe: int | None
    same_as_baseline: bool
    model: BidirectionalModel = field(repr=False, compare=False)

    @property
    def cache(self) -> str:
        return self.options.cache

    @property
    def block_length(self) -> int:
        return self.options.block_length

    @property
    def gen_length(self) -> int:
        return self.options.gen_length

    @cached_property
    def as_released(self) -> Decoded:
        """The reference's run in the forwards of the official code."""
        run = bidirectional.decode_as_released if self.options.verify == "freedave" else bidirectional.decode
        return run(self.model, self.prompt, self.options)

    @property
    def wasted(self) -> int:
        """Official forwards that ran although the block was known to be finished."""
        return self.as_released.wasted

    @property
    def needed_nfe(self) -> int:
        return self.nfe - self.wasted


@dataclass(frozen=True)
class BidirectionalGolden:
    """Golden data of one family with full attention."""

    checkpoint: Path
    model: BidirectionalModel
    mask_id: int
    eos_id: int
    logits: list[tuple[Tensor, Tensor]]
    """(input ids [T], logits [T, V], not shifted) of forwards without a cache."""
    cases: list[BidirectionalCase]


@functools.cache
def load_bidirectional(family: str, folder: Path = GOLDEN) -> BidirectionalGolden:
    """Golden data of one of ``BIDIRECTIONAL_FAMILIES``; the same cases for all, which remember the reference's run.

    Args:
        folder: has a folder per family.

    Raises:
        FileNotFoundError: the golden data is not there.
    """
    folder = folder / family
    tensors = load_file(folder / "logits.safetensors")
    logits = [(tensors[f"input_ids.{j}"], tensors[f"logits.{j}"]) for j in range(3)]
    raw = read_cases(folder)
    model = BidirectionalModel(folder / "checkpoint")
    mask_id, eos_id = raw["mask_token_id"], raw["eos_token_id"]
    cases = [_bidirectional(case, model, mask_id, shifted=family == "dream") for case in raw["cases"]]
    return BidirectionalGolden(folder / "checkpoint", model, mask_id, eos_id, logits, cases)


def _bidirectional(raw: dict[str, Any], model: BidirectionalModel, mask_id: int, *, shifted: bool) -> BidirectionalCase:
    kwargs, prompt = raw["kwargs"], raw["prompt_token_ids"]
    freedave = "FreeDave" in raw["repo"]
    gen_length = len(raw["output_token_ids"])
    options: dict[str, Any] = {"steps": kwargs.get("steps"), "top_k": kwargs.get("top_k")}
    threshold = kwargs.get("threshold", kwargs.get("confidence_threshold"))
    if threshold is not None:
        # On the whole sequence, Dream's confidence_threshold also goes by the number of steps.
        options |= {"policy": "threshold" if "block_length" in kwargs else "paced", "threshold": threshold}
    elif "factor" in kwargs:
        options |= {"policy": "factor", "factor": kwargs["factor"]}
    elif "alg" in kwargs:
        options |= {"policy": kwargs["alg"]}
    if "draft_steps" in kwargs:
        options |= {"verify": "freedave", "drafts": kwargs["draft_steps"], "match": "subset"}
    if kwargs.get("early_exit"):
        options |= {"early_exit": frozenset({kwargs["eos_token_id"], kwargs["pad_token_id"]})}
    sampler = "fastdllm" if not freedave else "freedave" if "draft_steps" in kwargs else "baseline"
    return BidirectionalCase(
        name=raw["name"],
        group=f"{sampler}-{raw['cache']}-{raw['mode']}",
        prompt=prompt,
        options=bidirectional.Options(
            mask_id=mask_id,
            gen_length=gen_length,
            block_length=kwargs.get("block_length", gen_length),
            shifted=shifted,
            cache=raw["cache"],
            always_two_forwards=sampler == "baseline",
            **options,
        ),
        tokens=raw["output_token_ids"],
        nfe=raw["nfe"],
        steps=[sorted((len(prompt) + position, token) for position, token in step) for step in raw["steps"]],
        nfe_at_first=raw.get("nfe_at_24cc59e") if raw["cache"] != "none" else None,
        baseline_nfe=raw.get("baseline_nfe"),
        same_as_baseline=raw.get("same_tokens_as_baseline", True),
        model=model,
    )
