"""What the tests of drafting engines share: checkpoints, engines by configuration, and a look at what is drafted."""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import LLM, SamplingParams

from tests import warm
from tests.engine.harness import generate, runner_of, scheduler_of
from tests.engine.shared import shared_engine, started_quickly
from tests.engine.speculators.checkpoints import (
    VOCAB,
    write_block_drafter,
    write_drafter,
    write_shifted_block_drafter,
    write_target,
)
from tests.reference.deer import Drafter, Round
from tests.reference.model import ReferenceModel
from vllm_dllm.decoding.adaptive import DraftController
from vllm_dllm.decoding.step_cost import StepCost

BLOCK_LENGTH = 8
"""Of the drafters with blocks."""

CONTEXTS = ("full", "causal", "block-causal")
CACHES = ("keep", "recompute")
EXACT = [(context, cache) for context in CONTEXTS for cache in CACHES if (context, cache) != ("full", "keep")]
"""Context and cache of drafters whose distributions depend on nothing but the text."""

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
}


CHECKPOINTS = tempfile.TemporaryDirectory(prefix="deer-")
"""Gone with the process."""


def target(vocab: int = VOCAB) -> Path:
    folder = Path(CHECKPOINTS.name, f"target-{vocab}")
    return folder if folder.exists() else write_target(folder, vocab=vocab)


def drafter(context: str, *, vocab: int = VOCAB, seed: int = 1, **config: Any) -> Path:
    """With ``seed=0`` it has the target's own weights, blocks apart."""
    folder = Path(CHECKPOINTS.name, "-".join(map(str, (context, vocab, seed, *config.items()))))
    if folder.exists():
        return folder
    if context == "shifted-block-causal":
        return write_shifted_block_drafter(folder, config.get("block_length", 2), seed, vocab)
    if context == "block-causal":
        return write_block_drafter(folder, config.get("block_length", BLOCK_LENGTH), seed, vocab)
    return write_drafter(folder, context, seed, vocab, **config)


@functools.cache
def reference_target(vocab: int = VOCAB) -> ReferenceModel:
    return ReferenceModel(target(vocab))


@functools.cache
def reference_drafter(
    context: str, num_drafts: int, *, vocab: int = VOCAB, seed: int = 1, limit: int = DEFAULTS["max_model_len"]
) -> Drafter:
    """What `drafter` is."""
    has_blocks = context == "block-causal"
    mask, sep = vocab - 2, vocab - 1
    return Drafter(
        model=ReferenceModel(drafter(context, vocab=vocab, seed=seed)),
        num_drafts=num_drafts,
        context=context,
        shifted=not has_blocks,
        mask=mask,
        sep=None if has_blocks else sep,
        block_length=BLOCK_LENGTH,
        missing=(mask,) if has_blocks else (mask, sep),
        substitute=0,
        limit=limit,
    )


def plain_engine(*, vocab: int = VOCAB, **options: Any) -> LLM:
    """The target without a drafter."""
    return _engine(target(vocab), None, options)


def engine(
    context: str,
    cache: str = "keep",
    *,
    num_drafts: int = 4,
    vocab: int = VOCAB,
    seed: int = 1,
    speculative: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """The engine of this configuration; the same one for every test that asks for it."""
    asked = {
        "method": "dllm",
        "model": str(drafter(context, vocab=vocab, seed=seed)),
        "num_speculative_tokens": num_drafts,
        "draft_cache": cache,
        **(speculative or {}),
    }
    return _engine(target(vocab), asked, options)


def engine_of(model: Path, **options: Any) -> LLM:
    """The target with this drafter, for what `engine` has no words for."""
    speculative = {"method": "dllm", "model": str(model), "num_speculative_tokens": 4, **options.pop("speculative", {})}
    return _engine(target(), speculative, options)


def _engine(model: Path, speculative: dict[str, Any] | None, options: dict[str, Any]) -> LLM:
    return shared_engine(
        (model, json.dumps(speculative), json.dumps(options)),
        lambda: LLM(str(model), speculative_config=speculative, **{**DEFAULTS, **options}),
    )


@contextlib.contextmanager
def tensor_parallel_engine(context: str, **speculative: Any) -> Iterator[LLM]:
    """An engine of two ranks, in processes of their own, whose drafter has the target's weights."""
    # Engines that ran in this process have bound its thread to one processor.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    asked = {"method": "dllm", "model": str(drafter(context, seed=0)), "num_speculative_tokens": 4, **speculative}
    with warm.workers(), started_quickly():
        llm = LLM(str(target()), tensor_parallel_size=2, speculative_config=asked, **DEFAULTS)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def sampled(seed: int | None, max_tokens: int = 12, **params: Any) -> SamplingParams:
    """Sampling at temperature 1 that goes on to ``max_tokens``."""
    return SamplingParams(
        **{
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": max_tokens,
            "detokenize": False,
            "ignore_eos": True,
            **params,
        }
    )


class Drafted(NamedTuple):
    """What a round drafted for one request."""

    slot: int
    text: list[int]
    distributions: torch.Tensor
    """[k, V] logits as the rejection sampler gets them."""
    drafts: list[int]


@contextlib.contextmanager
def drafted(llm: LLM) -> Iterator[list[Drafted]]:
    """All that is drafted meanwhile, of requests whose text is known; prompts in the making have no drafts.

    Nor have steps after which all requests end, which vLLM tells the drafter from 0.33 on.
    """
    runner = runner_of(llm)
    speculator, states = runner.speculator, runner.req_states
    propose, seen = speculator.propose, []

    def note(batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts, num_sampled = propose(batch, *args, **kwargs), args[4]
        for index in range(batch.num_reqs if kwargs["num_speculative_tokens"] else 0):
            if int(num_sampled[index]) == 0:
                continue
            slot = int(batch.idx_mapping[index])
            text = states.all_token_ids.gpu[slot, : int(states.total_len.gpu[slot])].tolist()
            logits = speculator.draft_logits
            distributions = torch.empty(0) if logits is None else logits[slot].to("cpu", copy=True)
            # FailFast cuts drafts.
            number = speculator.in_round[index] if hasattr(speculator, "in_round") else None
            seen.append(Drafted(slot, text, distributions, drafts[index].tolist()[:number]))
        return drafts

    speculator.propose = note
    try:
        yield seen
    finally:
        del speculator.propose


@contextlib.contextmanager
def verified(llm: LLM) -> Iterator[dict[str, list[Round]]]:
    """How the drafts of every request fare meanwhile, by the request's id. What vLLM's metrics are made of."""
    scheduler, rounds = scheduler_of(llm), {}
    count = scheduler.make_spec_decoding_stats

    def note(stats: Any, *, num_draft_tokens: int, num_accepted_tokens: int, request_id: str, **others: Any) -> Any:
        proposed = num_draft_tokens - (others["num_invalid_spec_tokens"] or {}).get(request_id, 0)
        rounds.setdefault(request_id.split("-")[0], []).append(Round(proposed, num_accepted_tokens))
        return count(
            stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            request_id=request_id,
            **others,
        )

    scheduler.make_spec_decoding_stats = note
    try:
        yield rounds
    finally:
        del scheduler.make_spec_decoding_stats


def share_accepted(rounds: dict[str, list[Round]]) -> float:
    """Of all drafts."""
    of_all = [round_ for own in rounds.values() for round_ in own]
    return sum(r.accepted for r in of_all) / sum(r.drafted for r in of_all)


def with_known_costs(llm: LLM, row: float = 0.05) -> DraftController:
    """Have an adaptive scheduler decide by costs that do not depend on the machine: 10 ms, and ``row`` ms per row."""
    scheduler = scheduler_of(llm)
    scheduler.draft_controller = DraftController(StepCost([(rows, False, 10 + row * rows) for rows in (1, 64)]))
    return scheduler.draft_controller


def draw(llm: LLM, prompt: list[int], num_draws: int, **params: Any) -> list[list[int]]:
    """Independent texts after one prompt."""
    outputs = generate(llm, [prompt] * num_draws, [sampled(seed, **params) for seed in range(num_draws)])
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_distributions(seen: list[Drafted], expected: Drafter) -> None:
    """What was drafted came from these distributions, to 1e-4."""
    assert seen
    for round_ in seen:
        distributions = expected.logits(round_.text)
        assert len(distributions), "a text at the limit"
        torch.testing.assert_close(
            round_.distributions[: len(distributions)],
            distributions,
            atol=1e-4,
            rtol=0,
            msg=lambda text, r=round_: f"{len(r.text)}: {text}",
        )
