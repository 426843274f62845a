"""Row plan and sampler of every kind of step: right on a GPU too, without the host ever waiting for the device."""

from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import full_attention
from tests.engine.harness import MASK, engine_of, generate
from tests.engine.runtime import test_isd, test_nemotron
from tests.engine.runtime.grammars import write_tokenizer
from tests.gpu_less.replay import Replay, replayed
from tests.reference.bidirectional import Options as FullAttentionOptions
from tests.reference.decode import Options
from vllm_dllm.methods import ESTIMATORS, POLICY_NAMES, PolicyRow, policy_row

PROMPTS = [list(range(10, 10 + length)) for length in (37, 5, 64)]
MAX_TOKENS = 9
"""So that texts of all lengths end in another block than they begin in."""
DRAFTS = {"max_drafts": 3}

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "stop": {"ignore_eos": False, "stop_token_ids": [5, 6]},
    "logprobs": {"logprobs": 2},
    "reshaped": {
        "temperature": 0.7,
        "seed": 1,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 1.0},
        "min_tokens": 4,
        "stop_token_ids": [5],
        "logprobs": 2,
    },
    "bad words": {"_bad_words_token_ids": [[7], [8, 9]]},
    "allowed": {"allowed_token_ids": [7, 8, 9, 10, 11]},
}
VERIFIERS: dict[str, dict[str, Any]] = {
    "freedave": {"dllm_verify": "freedave", "dllm_drafts": 3},
    "subset": {"dllm_verify": "freedave", "dllm_drafts": 3, "dllm_match": "subset"},
    "spiffy": {"dllm_verify": "spiffy", "dllm_drafts": 3},
    "psd": {"dllm_verify": "psd", "dllm_drafts": 2},
    "fef": {"dllm_verify": "fef", "dllm_window": 4},
}
BLOCKS = {
    "sdar": Options(block_length=8, mask_id=MASK),
    "sdar, eager": Options(block_length=4, mask_id=MASK),
    "llada2_moe": Options(block_length=16, mask_id=MASK),
    "fast_dllm_v2": Options(block_length=8, sub_block_length=4, mask_id=MASK),
}
FULL_ATTENTION = {
    "llada": FullAttentionOptions(mask_id=MASK, gen_length=32, block_length=8, cache="dual"),
    "dream": FullAttentionOptions(mask_id=MASK, gen_length=32, block_length=8, cache="prefix"),
}
ENGINES = (*BLOCKS, *FULL_ATTENTION)


LINEAR_SPEC = {"dllm_verify": "linear_spec"}
S2D2: dict[str, Any] = {"dllm_verify": "s2d2"}
SCORED: dict[str, Any] = {**S2D2, "dllm_route": "score", "dllm_score_cost": 0.0}


def engine_called(name: str, *, drafts: bool = True, dllm: dict[str, Any] | None = None, **more: Any) -> LLM:
    dllm = {**(DRAFTS if drafts else {}), **(dllm or {})}
    if name == "idlm":
        return test_isd.engine_of(dllm=dllm, **more)
    if name == "nemotron":
        return test_nemotron.engine_of(dllm=dllm, **more)
    if name in FULL_ATTENTION:
        return full_attention.engine_of(name, FULL_ATTENTION[name], dllm=dllm, max_num_seqs=8, **more)
    if name == "sdar, eager":
        dllm["eager"] = True
    return engine_of(name.split(",")[0], BLOCKS[name], dllm=dllm, max_num_seqs=8, **more)


def engine_for(options: dict[str, Any], name: str, **more: Any) -> LLM:
    """An engine for requests that ask for these ``options``."""
    dllm = {"verify": "s2d2", "window": DRAFTS["max_drafts"]} if options.get("dllm_verify") == "s2d2" else None
    return engine_called(name, drafts=bool(options), dllm=dllm, **more)


def params(args: dict[str, Any], **more: Any) -> SamplingParams:
    more = dict(more)
    bad_words = more.pop("_bad_words_token_ids", None)
    made = SamplingParams(
        **{"temperature": 0.0, "max_tokens": MAX_TOKENS, "detokenize": False, "ignore_eos": True, **more},
        extra_args=args,
    )
    if bad_words:
        made._bad_words_token_ids = bad_words
    return made


def replay(llm: LLM, *requests: SamplingParams) -> Replay:
    """Steps of three prompts with these parameters, in turn."""
    with replayed(llm) as found:
        generate(llm, PROMPTS, [requests[index % len(requests)] for index in range(len(PROMPTS))])
    assert found.steps
    return found


def assert_right(found: Replay) -> None:
    assert found.problems() == {}
    assert found.different == []


def is_possible(row: PolicyRow, *, has_windows: bool) -> bool:
    """The engine option ``eager`` takes policies that do not count the steps of a block, and some take no other."""
    return not row.counts_steps if has_windows else not row.needs_windows


# The engine option `eager` takes exact verifiers.
POLICIES = [
    (engine, policy)
    for engine in ("sdar", "sdar, eager", "dream")
    for policy in POLICY_NAMES
    if is_possible(policy_row(policy, timesteps=False), has_windows=engine == "sdar, eager")
]
VERIFIED = [
    (engine, verifier)
    for engine in ENGINES
    for verifier in VERIFIERS
    if engine != "sdar, eager" or verifier in ("freedave", "spiffy")
]


@pytest.mark.parametrize(("engine", "policy"), POLICIES)
def test_every_policy(engine: str, policy: str) -> None:
    asked = {"dllm_policy": policy}
    drafting = {**asked, **VERIFIERS["freedave"]}
    if policy_row(policy, timesteps=False).needs_windows:
        # It takes no drafts; its neighbours may have some.
        asked |= {"dllm_threshold": 0.5, "dllm_step_map": True}
        drafting = VERIFIERS["freedave"]
    assert_right(replay(engine_called(engine), params(asked), params(drafting)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_linear_spec_with_its_adapter(asynchronous: bool) -> None:
    """Beside requests that denoise."""
    llm = engine_called("nemotron", async_scheduling=asynchronous)
    sampling = params(LINEAR_SPEC, **SAMPLING["seeded"], top_p=0.9, logprobs=1)
    assert_right(replay(llm, params(LINEAR_SPEC), sampling, params(VERIFIERS["freedave"])))
    assert_right(replay(llm, params({**LINEAR_SPEC, "dllm_threshold": 0.5}), params(VERIFIERS["fef"]), params({})))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_strides(asynchronous: bool) -> None:
    sampling = params({}, **SAMPLING["seeded"], top_p=0.9, logprobs=1)
    llm = test_isd.engine_of(async_scheduling=asynchronous)
    assert_right(replay(llm, params({}), sampling, params({}, **SAMPLING["reshaped"])))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("engine", ["sdar", "llada"])
def test_every_sampling_parameter(engine: str, sampling: str) -> None:
    assert_right(replay(engine_called(engine, drafts=False), params({}, **SAMPLING[sampling])))


@pytest.mark.parametrize(("engine", "verifier"), VERIFIED)
def test_every_verifier(engine: str, verifier: str) -> None:
    llm = engine_called(engine)
    assert_right(replay(llm, params(VERIFIERS[verifier])))
    # And beside requests of other kinds.
    with_map = {"dllm_step_map": True}
    sampling = params({**VERIFIERS[verifier], **with_map}, **SAMPLING["seeded"], logprobs=1)
    assert_right(replay(llm, sampling, params(with_map, **SAMPLING["reshaped"]), params(VERIFIERS["freedave"])))


@pytest.mark.parametrize("engine", ["sdar", "fast_dllm_v2", "llada2_moe"])
def test_s2d2_by_every_estimator(engine: str) -> None:
    """And beside requests of other kinds."""
    llm = engine_for(S2D2, engine)
    edits = {"dllm_edit_threshold": 0.5, "dllm_max_post_edit_steps": 2} if engine == "llada2_moe" else {}
    assert_right(replay(llm, params({**S2D2, **edits})))
    scored = [params({**SCORED, "dllm_estimator": name}, **SAMPLING["seeded"]) for name in ESTIMATORS]
    others = [params({**S2D2, "dllm_step_map": True}, **SAMPLING["reshaped"]), params(VERIFIERS["freedave"])]
    assert_right(replay(llm, *scored[:3]))
    assert_right(replay(llm, *scored[3:], others[0]))
    assert_right(replay(llm, *others, scored[0]))


@pytest.mark.parametrize("engine", ["sdar", "fast_dllm_v2"])
def test_s2d2_with_causal_drafts(engine: str) -> None:
    llm = engine_called(engine, dllm={"verify": "s2d2", "window": DRAFTS["max_drafts"], "causal_drafts": True})
    assert_right(replay(llm, params(S2D2), params(S2D2, **SAMPLING["seeded"]), params({"dllm_verify": "none"})))


@pytest.mark.parametrize("engine", ["sdar", "fast_dllm_v2"])
def test_log_probabilities_after_sampling_parameters(engine: str) -> None:
    llm = engine_called(engine, drafts=False, logprobs_mode="processed_logprobs")
    assert_right(replay(llm, params({}, **SAMPLING["reshaped"]), params({}, **SAMPLING["seeded"], logprobs=1)))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("engine", BLOCKS)
def test_asynchronous_scheduling(engine: str, drafts: bool) -> None:
    llm = engine_called(engine, drafts=drafts, async_scheduling=True)
    asked = VERIFIERS["freedave"] if drafts else {}
    assert_right(replay(llm, params(asked), params(asked, **SAMPLING["seeded"])))


def test_editing_of_tokens() -> None:
    asked = {"dllm_edit_threshold": 0.5, "dllm_max_post_edit_steps": 2}
    assert_right(replay(engine_called("llada2_moe", drafts=False), params(asked)))


def test_guidance() -> None:
    llm = full_attention.engine_of("llada", FULL_ATTENTION["llada"], dllm={"guidance": True}, max_num_seqs=8)
    assert_right(replay(llm, params({"dllm_cfg_scale": 1.5}), params({})))


@pytest.mark.parametrize("engine", ["sdar", "fast_dllm_v2", "llada"])
def test_structured_outputs(engine: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The sampler's part of them. The question before it is a wait of its own (``runtime.logits.grammar``)."""
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    llm = engine_called(engine, skip_tokenizer_init=False, tokenizer=str(tokenizer))
    constrained = {"structured_outputs": StructuredOutputsParams(choice=["yes", "yes indeed", "no"])}
    asked = {"dllm_policy": "threshold", "dllm_threshold": 0.3}
    assert_right(replay(llm, params(asked, **constrained), params(VERIFIERS["freedave"])))
    constrained = {"structured_outputs": StructuredOutputsParams(regex="[a-z]{4,9}")}
    assert_right(replay(llm, params(asked, **SAMPLING["reshaped"], **constrained), params({}, **SAMPLING["seeded"])))
