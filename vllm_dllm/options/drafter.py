"""``--speculative-config`` with ``method: dllm`` for an autoregressive target: keys, types and defaults."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

DEFAULT_DRAFT_TOKENS = 16
MOST_DRAFT_TOKENS = 128
"""Four times the longest block of the paper."""
DEFAULT_SUB_BLOCK = 8
"""Of FailFast's paper."""
BLOCK_KEYS = ("unmask_threshold", "sub_block_length", "draft_forwards")
"""Keys that only ``draft_length: failfast`` reads, with a drafter that fills diffusion blocks."""
FAILFAST_KEYS = (
    "draft_length_start",
    "draft_length_step",
    "draft_length_max",
    "draft_length_threshold",
    *BLOCK_KEYS,
)
"""Keys that only ``draft_length: failfast`` reads."""


class DrafterChoices(BaseModel):
    """Keys of ``speculative_config`` that vLLM does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_cache: Literal["keep", "recompute"] = "keep"
    """K/V of the text: kept from the round in which the text was new, or computed anew in every round."""
    adaptive: bool = False
    """Verify fewer drafts of a request whose last drafts were rejected early."""
    draft_length: Literal["fixed", "failfast"] = "fixed"
    """How many drafts a round has: always k, or as many as the drafter is sure of (FailFast, arXiv 2512.20573)."""
    draft_length_start: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 10
    """FailFast: drafts that a round aims for at first."""
    draft_length_step: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 10
    """FailFast: drafts more that a round aims for while all confidences reach the threshold (N in the paper)."""
    draft_length_max: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = 60
    """FailFast: drafts with so many confidences no longer grow (N_max in the paper)."""
    draft_length_threshold: Annotated[float, Field(ge=0, le=1)] = 0.45
    """FailFast: least confidence of a drafter that is sure (tau in the paper)."""
    unmask_threshold: Annotated[float, Field(ge=0, le=1)] = 0.05
    """FailFast with blocks: masks with a confidence above get their tokens in one forward, and the likeliest one."""
    sub_block_length: Annotated[int, Field(ge=1)] | None = None
    """FailFast with blocks: positions that one forward fills. Default: `DEFAULT_SUB_BLOCK`, or a shorter block."""
    draft_forwards: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] | None = None
    """FailFast with blocks: forwards of a round. Default: those of the longest draft, one per sub-block."""
    draft_temperature_factor: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Drafts of a request with a temperature are drawn at this many times that temperature."""
    vocab_mapping: str | None = None
    """File with the pairs of drafter's and target's ids that mean the same token, where the tokenizers differ."""


class DrafterOptions(DrafterChoices):
    """`DrafterChoices` and what the start found out; the drafter's configuration carries them to the workers."""

    missing_ids: tuple[int, ...] = ()
    """Tokens of the target that the drafter does not share."""

    @property
    def recompute(self) -> bool:
        """Whether every round computes the whole text."""
        return self.draft_cache == "recompute"

    @property
    def fails_fast(self) -> bool:
        """Whether drafts have as many tokens as the drafter is sure of."""
        return self.draft_length == "failfast"


UNFIT_BACKENDS = ("FLASHINFER", "FLEX_ATTENTION")
"""Attention backends whose buffers hold a batch of requests; a plan makes several requests of one."""


def _takes_groups(backend: str) -> str:
    """Refuse attention backends that cannot attend in groups of rows, of which a request has several."""
    if backend.upper() in UNFIT_BACKENDS:
        raise ValueError("cannot attend in groups of rows; allowed: FLASH_ATTN, TRITON_ATTN and others that can")
    return backend


class DrafterConfig(DrafterChoices):
    """``--speculative-config`` for an autoregressive target: `DrafterChoices` and keys that go on to vLLM."""

    method: Literal["dllm"] = "dllm"
    model: Annotated[str, Field(min_length=1)] | None = None
    """The drafter, a folder or a model of the hub. Default: the target's entry in `KNOWN_DRAFTERS`."""
    config_format: Literal["open_dcoder", "pangu_diffusion"] | None = None
    """The drafter's family, where its ``config.json`` is that of an autoregressive model and names no mask token."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)] = DEFAULT_DRAFT_TOKENS
    """Tokens drafted per round, all in one forward of the drafter (k in the paper)."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    """``probabilistic``: drafts are drawn from the drafter's distribution, which the rejection test then reads.
    ``greedy``: drafts are the drafter's most likely tokens; the engine then keeps no distribution."""
    draft_tensor_parallel_size: Annotated[int, Field(ge=1)] | None = None
    """1: every rank has the whole drafter. The target's size, the default: the drafter is split like the target."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    quantization: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: Annotated[str, AfterValidator(_takes_groups)] | None = None
    rejection_sample_method: Literal["standard"] = "standard"
    """vLLM's ``block`` draws with the same noise again after a rejection, which changes the output's distribution."""

    @property
    def options(self) -> DrafterOptions:
        """The keys that vLLM does not know."""
        return DrafterOptions(**self.model_dump(include={*DrafterChoices.model_fields}))
