"""Bad words never come out, in whatever order tokens fill in, are masked again and are edited."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM, SamplingParams

from tests.engine import full_attention
from tests.engine.harness import MASK, bundled, drafting_engine, generate, tokens_of
from tests.engine.runtime.test_golden import options_with
from tests.reference.bidirectional import Options as FullOptions
from tests.reference.decode import Options
from vllm_dllm.runtime.logits.bad_words import BlockBadWords

PROMPTS = [[5, 6, 7], list(range(20, 57)), [9] * 5 + [3], list(range(100, 131)), [1]]
LENGTH = 16


def _sdar() -> LLM:
    return drafting_engine("sdar", options_with(bundled("sdar"), 8))


def _llada2() -> LLM:
    return drafting_engine(
        "llada2_moe", Options(block_length=LENGTH, mask_id=MASK), dllm={"verify": "s2d2", "max_drafts": 8}
    )


def _windows() -> LLM:
    return drafting_engine("llada2_moe", Options(block_length=8, mask_id=MASK), dllm={"eager": 3})


def _fast_dllm() -> LLM:
    return drafting_engine("fast_dllm_v2", Options(block_length=8, mask_id=MASK, sub_block_length=4, shifted=True))


def _dream() -> LLM:
    options = FullOptions(mask_id=MASK, gen_length=32, block_length=LENGTH, cache="dual", generation_window=32)
    return full_attention.drafting_engine("dream", options, dllm={"max_drafts": 7}, max_num_seqs=8, max_model_len=288)


EDITING = {"dllm_verify": "none", "dllm_threshold": 0.3, "dllm_edit_threshold": 0.05}
FEF = {"dllm_verify": "fef", "dllm_resample_steps": 3, "dllm_remask": 0.5, "dllm_window": 4}
MULTI_BLOCK = {"dllm_policy": "multi_block"}
FREEDAVE = {"dllm_verify": "freedave", "dllm_drafts": 4}
CASES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "edited": (_llada2, EDITING, 0.0),
    "edited, drawn": (_llada2, EDITING, 1.0),
    "edited, drawn, with drafts": (_llada2, EDITING | FREEDAVE, 1.0),
    "edited, drawn, several at a time": (_llada2, EDITING | {"dllm_threshold": 0.01}, 1.0),
    "edited with S2D2": (_llada2, EDITING | {"dllm_verify": "s2d2"}, 0.7),
    "edited in several blocks": (_windows, EDITING | MULTI_BLOCK, 0.7),
    "FeF": (_sdar, FEF, 0.0),
    "FeF, drawn": (_sdar, FEF, 0.7),
    "FeF, commits predict": (_fast_dllm, FEF, 0.7),
    "FeF, shifted": (_dream, FEF, 0.7),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_words_of_several_tokens_do_not_come_out(case: str) -> None:
    """Of requests that like eight tokens, and what these come together to without bad words."""
    engine, args, temperature = CASES[case]
    llm = engine()

    def texts(words: list[list[int]]) -> list[list[int]]:
        asked = []
        for seed, prompt in itertools.product(range(4), PROMPTS):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=48, ignore_eos=True, detokenize=False, extra_args=args
            )
            params.logit_bias = {40 + 3 * i: 9.0 + (i + seed) % 3 for i in range(8)}
            params._bad_words_token_ids = words
            asked.append((prompt, params))
        return [tokens_of(output) for output in generate(llm, *map(list, zip(*asked, strict=True)))]

    def runs(tokens: list[int], length: int) -> list[tuple[int, ...]]:
        return list(zip(*(tokens[i:] for i in range(length)), strict=False))

    free = texts([])
    pairs = Counter(pair for tokens in free for pair in runs(tokens, 2)).most_common(16)
    longer = Counter(run for tokens in free for run in runs(tokens, 4)).most_common(16)
    words = {word for word, _ in pairs + longer}
    for tokens in texts([list(word) for word in sorted(words)]):
        assert len(tokens) == 48
        assert not words & {*runs(tokens, 2), *runs(tokens, 4)}


def test_words_of_tokens_that_the_model_does_not_have_never_come_out() -> None:
    """As a tokenizer with added tokens makes them. vLLM knows the tokenizer's last token alone."""
    llm = _sdar()
    vocab = llm.model_config.get_vocab_size()
    asked = []
    for words in ([[7]], [[vocab], [7], [7, vocab + 3]]):
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logit_bias={7: 9.0})
        params._bad_words_token_ids = words
        asked.append(params)
    known, also_unknown = generate(llm, [PROMPTS[0]] * 2, asked)
    assert tokens_of(known) == tokens_of(also_unknown)
    assert 7 not in tokens_of(known)


def _may_stand(
    words: list[list[int]],
    text: list[int],
    prompt: int,
    start: int,
    at: int,
    token: int,
    edits: bool,
) -> bool:
    """Whether ``token`` is barred at position ``at``: one word, one place at a time."""
    window = range(start, len(text))
    own = text[at] if at < len(text) else MASK
    is_edit = edits and own != MASK
    for word, place in [(each, i) for each in words for i in range(len(each)) if each[i] == token]:
        places = [at - place + i for i in range(len(word))]
        if min(places) < prompt:
            continue
        there = [text[p] if p < len(text) else MASK for p in places]
        others = [i for i in range(len(word)) if i != place]
        fits = [there[i] in (word[i], MASK) or (is_edit and places[i] in window) for i in others]
        if not all(fits):
            continue
        if is_edit and token != own and places[-1] in window:
            return True
        if not is_edit and (place == len(word) - 1 or there[-1] != MASK):
            return True
    return False


@pytest.mark.parametrize("seed", range(6))
def test_every_row_against_its_words_one_by_one(seed: int) -> None:
    """Six requests at a time, of which some edit tokens, some have no words, and some are in their prompt's block."""
    rng = np.random.default_rng(seed)
    vocab, width, num = 6, 5, 6
    state = BlockBadWords(num + 2, torch.device("cpu"))
    texts, prompts, starts, words, edits = [], [], [], [], []
    for slot in range(num):
        start, prompt = int(rng.integers(1, 12)), int(rng.integers(1, 14))
        # The window has masks, the text before it has none.
        shown = rng.integers(0, vocab, start + width)
        shown[start:][rng.random(width) < 0.4] = MASK
        own = [rng.integers(0, vocab, rng.integers(1, 5)).tolist() for _ in range(rng.integers(0, 4))]
        texts.append(shown.tolist())
        prompts.append(prompt)
        starts.append(start)
        words.append(own)
        edits.append(bool(rng.integers(2)))
        state.add_request(slot, own, edits=edits[-1])
    all_tokens = torch.zeros(num + 2, 64, dtype=torch.int32)
    for slot, text in enumerate(texts):
        all_tokens[slot, : starts[slot]] = torch.tensor(text[: starts[slot]])
    req_states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=all_tokens),
        prompt_len=SimpleNamespace(gpu=torch.tensor([*prompts, 0, 0], dtype=torch.int32)),
    )
    slots_np = rng.permutation(num)
    slots = torch.from_numpy(slots_np)
    start = torch.tensor(starts)[slots]
    # A row for each column, in any order, and one for the position behind the window.
    columns = torch.from_numpy(np.stack([rng.permutation(width + 1) for _ in range(num)]))
    window = torch.tensor([texts[slot][starts[slot] :] for slot in slots_np])
    logits = torch.from_numpy(rng.normal(size=(num * (width + 1), vocab))).float()
    before = logits.clone().view(num, width + 1, vocab)
    after = state.apply(
        logits,
        slots_np,
        slots,
        start.unsqueeze(1) + columns,
        window,
        start,
        MASK,
        req_states,  # type: ignore[arg-type]
    ).view(num, width + 1, vocab)
    barred = 0
    for (group, slot), row, token in itertools.product(enumerate(slots_np), range(width + 1), range(vocab)):
        at = starts[slot] + int(columns[group, row])
        if at < prompts[slot]:
            continue
        expected = _may_stand(words[slot], texts[slot], prompts[slot], starts[slot], at, token, edits[slot])
        value = after[group, row, token].item()
        assert value == (-torch.inf if expected else before[group, row, token].item()), (slot, at, token)
        barred += expected
    assert barred
