"""Options of the engine (``additional_config={"dllm": {...}}``) and of a request (``extra_args`` / ``vllm_xargs``).

What an option may be stands here, what goes together in `vllm_dllm.options.resolve`, and what each is for in
``docs/options.md``.
"""

import difflib
import itertools
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from vllm_dllm.methods import SCHEDULES, EstimatorName, PolicyName, RouteName, VerifierName
from vllm_dllm.options.errors import MisplacedOptionError, OptionError, parse_options, shown

CacheName = Literal["none", "prefix", "dual"]

MOST_DRAFTS = 64
"""Largest ``drafts``, ``max_drafts`` and ``window``. No block profits from more drafts."""

ENGINE_KEY = "dllm"
"""Key of our options inside vLLM's ``additional_config``."""

REQUEST_PREFIX = "dllm_"
"""Prefix of our keys inside ``SamplingParams.extra_args``, which only holds flat keys over HTTP."""

MOST_STEPS = 1 << 16
"""Largest number of denoising steps. Without a schedule of timesteps a block takes at most one step per position."""

MOST_POST_EDIT_STEPS = 256
"""Largest ``max_post_edit_steps``. Tokens that are drawn anew with every look may never settle."""

MOST_PASSES = 64
"""Largest ``resample_steps``; FeF-DLLM (arXiv 2605.14305) tries 2 and 4."""

LARGEST = 1e6
"""Largest value of an option that has no other bound. A larger value would choose the same positions: ``factor``, for
example, allows all positions of a block from the length of the block on."""

LARGEST_SCALE = 1e3
"""Largest ``cfg_scale``. LLaDA's own are below 10; far above, the logits would leave what float16 can hold."""

LEAST_SHARE = 1e-6
"""Least ``block_add_threshold``: a block begins once a part of the block in front is decoded."""

MOST_WINDOW_BLOCKS = 64
"""Every request computes all blocks of a window in every step."""

LEAST_ALG_TEMP = 1e-4
"""Least ``alg_temp`` above 0. A score divided by a much smaller temperature is infinite, and infinite scores have no
order."""

_LARGEST_INT = 2**31 - 1
"""The worker keeps a request's options as 32-bit integers."""


class DecodingOptions(BaseModel):
    """Options that a request may set, and whose defaults the engine may set. ``None``: not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: PolicyName | None = None
    """Which masked positions a denoising step unmasks."""
    tokens_per_step: Annotated[int, Field(ge=1, le=_LARGEST_INT)] | None = None
    """Positions unmasked per denoising step (``static``, ``sequential``), or at least (``threshold``)."""
    denoising_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Denoising steps per block, instead of ``tokens_per_step``: the positions are spread over the steps as the
    reference samplers do. With timesteps at most 8 per position of a block."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Denoising steps over all blocks of a request, instead of ``tokens_per_step`` and ``denoising_steps``: a multiple
    of the number of blocks that ``max_tokens`` makes."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Confidence above which ``threshold`` unmasks a position (LLaDA, Dream: from which). Positions that reach it are
    the anchors of ``localleap``."""
    entropy_bound: Annotated[float, Field(gt=0.0, le=LARGEST)] | None = None
    """Total entropy in nats that one step of ``entropy`` may unmask. Default: 0.35; of Dream none, whose ``entropy``
    goes by timesteps."""
    edit_threshold: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """Token editing (LLaDA2.1): replace an unmasked token when another token's probability exceeds this. Default:
    off."""
    max_post_edit_steps: Annotated[int, Field(ge=0, le=MOST_POST_EDIT_STEPS)] | None = None
    """Denoising steps a block may spend on editing once nothing is masked in it."""
    relaxed_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Confidence from which ``localleap`` unmasks a position near an anchor, and above which ``hierarchy`` unmasks one
    position of each run of masks."""
    radius: Annotated[int, Field(ge=0, le=_LARGEST_INT)] | None = None
    """Positions on either side of an anchor that ``localleap`` calls near."""
    factor: Annotated[float, Field(gt=0.0, le=LARGEST)] | None = None
    """``factor`` unmasks the n most confident positions while ``(n + 1) * (1 - confidence)`` stays below this."""
    block_add_threshold: Annotated[float, Field(ge=LEAST_SHARE, le=1.0)] | None = None
    """Share of a block's positions that ``multi_block`` decodes before it begins the block behind."""
    decoded_token_threshold: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of a block's positions that ``multi_block`` decodes before it unmasks a position of the block behind in
    every step."""
    alg_temp: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """Dream's temperature over positions: above 0 the positions to unmask are drawn by their scores."""
    cfg_scale: Annotated[float, Field(ge=0.0, le=LARGEST_SCALE)] | None = None
    """Classifier-free guidance: how far logits move away from those of the same text with its prompt masked."""
    confidence_top_k: Annotated[int, Field(ge=1, le=_LARGEST_INT)] | None = None
    """Confidence, margin and entropy are those of the k most likely tokens alone, at temperature 0 too, unlike with
    ``top_k``. Default: all tokens."""
    verify: VerifierName | None = None
    """Skips denoising steps: drafts later states of the block and verifies them all in one forward."""
    drafts: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | Literal["auto"] | None = None
    """Drafts per forward, counted as the verifier's paper does. ``auto``: as many as pay at the moment's load."""
    window: Annotated[int, Field(ge=1, le=MOST_DRAFTS)] | None = None
    """Positions that a round of ``fef`` drafts, and that a forward of ``s2d2`` verifies at most. Default: ``fef`` 16,
    ``s2d2`` as many as take 128 rows (Fast-dLLM v2: 64), or the block if that is shorter."""
    resample_steps: Annotated[int, Field(ge=1, le=MOST_PASSES)] | None = None
    """Passes of ``fef`` over a block."""
    remask: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a block's positions that a further pass of ``fef`` draws anew."""
    route: RouteName | None = None
    """When ``s2d2`` verifies its drafts. Otherwise the policy unmasks."""
    min_span: Annotated[int, Field(ge=1, le=_LARGEST_INT)] | None = None
    """Masked positions in a row from which the route ``span`` verifies."""
    score_threshold: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Score from which the route ``score`` verifies: the drafts that are expected to be accepted, less the cost."""
    score_on: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Score above which the route ``hysteresis`` begins to verify."""
    score_off: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    """Score below which the route ``hysteresis`` no longer verifies."""
    score_cost: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """What a verifying forward costs, in accepted drafts."""
    score_cost_per: Literal["forward", "token"] | None = None
    """Whether ``score_cost`` is that of the forward, or is counted for each position that ``threshold`` would unmask
    instead."""
    estimator: EstimatorName | None = None
    """How ``s2d2`` guesses from the drafting logits that a draft will be accepted."""
    estimator_parameter: Annotated[float, Field(ge=0.0, le=LARGEST)] | None = None
    """The number of ``estimator``. Default: each estimator has its own ([S2D2](s2d2.md#when-to-verify))."""
    match: Literal["exact", "subset"] | None = None
    """What FreeDave accepts: a draft that equals the next state, or (lossy) one whose tokens are all in it."""
    eos_early_stop: bool | None = None
    """End inside a block, as soon as no position before a stop token, or before the end of ``max_tokens``, is masked;
    off, as the reference samplers do. A request that edits tokens ends with its block."""
    step_map: bool | None = None
    """``request_stats`` tells of each token which denoising step and which forward unmasked it. Default: off."""
    step_events: bool | None = None
    """The stream of the answer tells after every forward which tokens are unmasked, those of unfinished blocks included
    (`vllm_dllm.step_event`). Default: off."""
    infill: bool | Literal["max_tokens"] | None = None
    """Fill in the mask tokens of the prompt, wherever they stand (models with full attention). ``"max_tokens"``: the
    prompt has one, which stands for ``max_tokens`` masks. Default: off."""

    @field_validator("infill", mode="before")
    @classmethod
    def _boolean_or_name(cls, infill: Any) -> Any:
        if isinstance(infill, str) and infill.lower() not in ("max_tokens", "true", "false"):
            raise ValueError("allowed: true, false, 'max_tokens'")
        return infill

    @field_validator("denoising_steps", "steps")
    @classmethod
    def _one_schedule(cls, steps: int | None, info: ValidationInfo) -> int | None:
        others = [name for name in SCHEDULES if name != info.field_name and info.data.get(name) is not None]
        if steps is not None and others:
            raise ValueError(f"{', '.join(SCHEDULES)} exclude each other; give one of them")
        return steps

    @field_validator("alg_temp")
    @classmethod
    def _off_or_not_too_small(cls, alg_temp: float | None) -> float | None:
        if alg_temp is not None and 0 < alg_temp < LEAST_ALG_TEMP:
            raise ValueError(f"it must be 0, or at least {LEAST_ALG_TEMP}")
        return alg_temp


class DllmConfig(DecodingOptions):
    """Engine options: the defaults of every request, and what is fixed for the life of the engine."""

    block_length: Annotated[int, Field(ge=1)] | None = None
    """Diffusion block length. Another one than the checkpoint's is a warning, but for models with full attention.
    Default: the checkpoint's, or the number in its name (``-b32``), or the family's."""
    sub_block_length: Annotated[int, Field(ge=1)] | None = None
    """Finish blocks in sub-blocks of this length, left to right. Default: the family's."""
    max_drafts: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | None = None
    """Most drafts beside the block itself that a request may have in one forward; K/V pages are set aside for them.
    Default: what the engine's own ``verify`` and ``drafts`` need."""
    draft_graph: str | None = None
    """File of a calibrated draft graph. Default: ``spiffy`` the one that ships for the family, ``psd`` a chain."""
    eager: bool | Annotated[int, Field(ge=2, le=MOST_WINDOW_BLOCKS)] | None = None
    """Windows of several blocks: drafts reach into the blocks after the current one, which pays where blocks are short,
    and ``multi_block`` denoises several blocks at a time. A number: blocks of a window, more where drafts need more.
    Default: off."""
    cache: CacheName | None = None
    """What a model with full attention recomputes in a step: ``none`` everything, ``prefix`` the current block and all
    behind it, ``dual`` the current block. The rest keeps its K/V of the last refresh. Default: ``dual``."""
    generation_window: Annotated[int, Field(ge=1)] | None = None
    """Most positions, from the current block on, that are part of the sequence of a model with full attention.
    Default: 1024."""
    refresh_interval: Annotated[int, Field(ge=1)] | None = None
    """Denoising steps after which all K/V are computed anew, beside the start of each block. Default: none."""
    guidance: bool | None = None
    """Make room for ``cfg_scale``: rows and K/V pages of a second text. Default: off, unless the engine has a
    ``cfg_scale`` of its own."""

    first_token: Literal["autoregressive", "denoised"] | None = None
    """Where the first token of a block comes from (Nemotron-Labs-Diffusion): ``autoregressive``: from the last logits
    of the text before, as in NVIDIA's code; ``denoised``: from the block, like its other tokens, as in vLLM's and
    SGLang's. Default: ``autoregressive``."""

    draft_adapter: bool | str | None = None
    """Use an adapter for rows that draft: the checkpoint's for ``linear_spec``, in its folder ``linear_spec_lora``, or
    for ``linear_spec`` and ``isd`` that at a path or of a name on the hub. Default: the checkpoint's where there is
    one."""

    causal_cache: bool | None = None
    """Compute the K/V of prompts and finished blocks under a causal mask, as the verifier of ``s2d2`` would have them.
    Default: off."""

    causal_drafts: bool | None = None
    """Draft with ``s2d2`` such that the positions of a block before its first mask see only what is before them, as its
    verifier has them (SDAR, Fast-dLLM v2). Default: off."""

    compile_steps: bool | None = None
    """Compile what a step does around the model into few kernels. Default: on a GPU, unless vLLM is told to compile
    nothing (``--enforce-eager``, ``-O0``)."""

    @field_validator("eager", mode="before")
    @classmethod
    def _no_number_below_two(cls, eager: Any) -> Any:
        # To pydantic 1 is True.
        if not isinstance(eager, bool) and eager in (0, 1, "0", "1"):
            raise ValueError("give true, false, or a number of blocks of at least 2")
        return eager

    @field_validator("infill", "step_events")
    @classmethod
    def _of_requests(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            reasons = {
                "infill": "each request has a text of its own to fill in",
                "step_events": "only a streamed request has a reader for them",
            }
            assert info.field_name is not None
            raise ValueError(f"{reasons[info.field_name]}; give {REQUEST_PREFIX}{info.field_name} with the request")
        return value

    @property
    def has_room_for_guidance(self) -> bool:
        """Whether requests of the engine may have a ``cfg_scale``, for which a second text needs rows and K/V pages."""
        return bool(self.cfg_scale) if self.guidance is None else self.guidance


def parse_engine_options(additional_config: dict[str, Any] | None) -> DllmConfig:
    """Validate ``additional_config["dllm"]``, and refuse our options beside that key (``OptionError``)."""
    given = additional_config or {}
    for key in given:
        if key != ENGINE_KEY and _looks_like_ours(key):
            raise OptionError(
                f"additional_config[{shown(key)}] is not read: engine options of vllm-dllm belong under the key "
                f'"{ENGINE_KEY}", as in {{"{ENGINE_KEY}": {{"threshold": 0.9}}}}',
            )
    values = given.get(ENGINE_KEY, {})
    if not isinstance(values, dict):
        raise OptionError(
            f"engine option additional_config[{ENGINE_KEY!r}]={values!r} is not allowed: it must be an object",
        )
    return parse_options(DllmConfig, values, "", "engine option")


def _looks_like_ours(key: Any) -> bool:
    """Whether a key of ``additional_config`` is an option of ours, or a slip of the pen for `ENGINE_KEY`."""
    if not isinstance(key, str):
        return False
    slip = difflib.get_close_matches(key.lower(), (ENGINE_KEY,), cutoff=0.8)
    return bool(slip) or _words(key)[0] == ENGINE_KEY or key in DllmConfig.model_fields


def _words(key: str) -> list[str]:
    """The words of a key however it is written, without the place in front of it: ``vllm-DLLM`` is ``dllm``."""
    words = re.findall("[a-z0-9]+", key.lower()) or [""]
    return [*itertools.dropwhile({"vllm", "xargs"}.__contains__, words[:-1]), words[-1]]


def _is_a_slip(key: str) -> bool:
    """Whether a key of a request was meant to be an option of ours: ``dllm``, ``dllm-threshold``, ``dlm_threshold``."""
    head, *rest = _words(key)
    resembles = head.startswith(ENGINE_KEY[0]) and bool(difflib.get_close_matches(head, (ENGINE_KEY,), cutoff=0.8))
    in_one_word = {ENGINE_KEY + name.replace("_", "") for name in DecodingOptions.model_fields}
    return head == ENGINE_KEY or (resembles and "_".join(rest) in DecodingOptions.model_fields) or head in in_one_word


def parse_request_options(extra_args: dict[str, Any] | None) -> DecodingOptions:
    """Validate the ``dllm_*`` keys of ``SamplingParams.extra_args``, or raise ``OptionError``."""
    values: dict[str, Any] = {}
    for key, value in (extra_args or {}).items():
        if not isinstance(key, str):
            continue
        if key in DecodingOptions.model_fields:
            raise MisplacedOptionError(
                f"request option {key}={shown(value)} is not read without its prefix; write {REQUEST_PREFIX}{key}",
                key,
                value,
            )
        if key.startswith(REQUEST_PREFIX):
            values[key.removeprefix(REQUEST_PREFIX)] = value
        elif _is_a_slip(key):
            raise MisplacedOptionError(
                f"request option {key}={shown(value)} is not read: request options of vllm-dllm have keys of their own "
                f"that begin with {REQUEST_PREFIX!r}, as in {REQUEST_PREFIX}threshold=0.9",
                key,
                value,
            )
    return parse_options(DecodingOptions, values, REQUEST_PREFIX, "request option", of_engine=DllmConfig.model_fields)
