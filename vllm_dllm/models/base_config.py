"""What the configurations of all families have in common."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from transformers import PreTrainedConfig

from vllm_dllm.observe.step_events import StreamedEvents
from vllm_dllm.traits import FamilyTraits

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_dllm.geometry import Geometry
    from vllm_dllm.runtime.plan.drafter import Drafter

# Folders under a model's name: of the hub's cache ("models--JetLM--...-b32/snapshots/<commit>") and of a training run.
_BELOW_NAME = re.compile(r"(/snapshots/[^/]+)?(/checkpoint-\d+)?/*$")
_LENGTH_IN_NAME = re.compile(r"-b(4|8|16|32|64)(?=$|[-_.])", re.IGNORECASE)


DEFAULT_MAX_TOKENS = 256
"""Answers of this length are what LLaDA and Fast-dLLM (arXiv 2505.22618) evaluate with."""


SUPPORTED_EVERYWHERE = {"use_sliding_window": (False, None), "sliding_window": (None,)}
"""``supported_values`` of all families."""


def own_name(name: str) -> str:
    """The part of a model's name that is the model's own.

    Args:
        name: also with an organisation, or a path. Its last part is the name, or the one before a training run's
            ``checkpoint-N``; the others say nothing, since they may be of other models.
    """
    return _BELOW_NAME.sub("", name).rsplit("/", 1)[-1]


def block_length_of_name(name: str) -> int | None:
    """Block length in a model's name, as in `own_name`: ``-b4``, ``-b8``, ``-b16``, ``-b32`` or ``-b64``, at its end or
    before ``-``, ``_`` or ``.`` (``SDAR-8B-Chat-b32-AWQ``). Of several the last counts."""
    lengths = _LENGTH_IN_NAME.findall(own_name(name))
    return int(lengths[-1]) if lengths else None


class BlockDiffusionConfig(PreTrainedConfig):
    """What every block-diffusion family adds to the configuration of its backbone.

    Hub configurations leave most of it out; ``block_length`` then comes from the model's name (``-b32``) and
    everything else from the family's traits.
    """

    traits: ClassVar[FamilyTraits]
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "block_length", "bd_size": "block_length"}

    supported_values: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """What the backbone can do of settings that change the computation; other values are refused."""

    served: ClassVar[dict[str, set[str]]] = {}
    """``architectures`` by the ``model_type`` of all families; `vllm_dllm.plugin` adds those that it registers."""

    diffusion_supports_sampling_params: ClassVar[bool] = True
    """For `vllm_dllm.patches.sampling_params`: our sampler honours what vLLM refuses for diffusion models."""

    diffusion_structured_output_backends: ClassVar[tuple[str, ...]] = ("xgrammar", "guidance")
    """For `vllm_dllm.patches.structured_outputs`: the sampler honours grammars of these backends, which can go back."""

    model_stat_loggers: ClassVar[tuple[str, ...]] = ("vllm_dllm.observe.metrics.DiffusionStatLogger",)
    """Read by `vllm_dllm.patches.model_stat_loggers`."""

    draft_scheduler_cls: ClassVar[str] = "vllm_dllm.speculators.scheduler.create_scheduler"
    """Of an engine with this drafter; for `vllm_dllm.patches.draft_model_speculators`."""

    geometry: ClassVar["Geometry | None"] = None
    """What the engine is; the hook sets the record on the instance of an engine's model. A drafter has none."""

    # Without an annotation, which would make it a field of config.json.
    guessed_block_length = cast("tuple[int, str] | None", None)
    """Where ``config.json`` gives no ``block_length``: which one was taken, and from what; set on the instance."""

    block_length: int | None = None
    mask_token_id: int | None = None
    sep_token_id: int | None = None
    """What a drafter for autoregressive targets was trained to find behind its masks (DEER's ``[SEP]``)."""
    drafter_options: dict[str, Any] | None = None
    """Of a drafter; the workers find them here (`vllm_dllm.options.drafter.DrafterOptions`)."""

    def __post_init__(self, **kwargs: Any) -> None:
        # To vLLM's backbones False means attention without a KV cache.
        kwargs.pop("is_causal", None)
        super().__post_init__(**kwargs)
        if getattr(self, "use_sliding_window", None) is False:
            # vLLM reads `sliding_window` alone, and would limit attention to it.
            self.sliding_window = None
        self.check_supported_values()
        if self.block_length is None:
            named = block_length_of_name(self.name_or_path or "")
            self.block_length = named or self.traits.block_length
            source = f"the name {self.name_or_path}" if named else f"the default of {self.traits.family} models"
            self.guessed_block_length = self.block_length, source
        if self.mask_token_id is None:
            self.mask_token_id = self.traits.mask_token_id

    def check_supported_values(self) -> None:
        """Refuse settings that the backbone cannot do. The hook asks again, behind ``--hf-overrides``."""
        for key, values in {**SUPPORTED_EVERYWHERE, **self.supported_values}.items():
            value = getattr(self, key, values[0])
            if value not in values:
                raise ValueError(
                    f"{key}={value!r} is not supported for {self.traits.family} models; "
                    f"allowed: {', '.join(map(repr, values))}"
                )

    @property
    def canvas_length(self) -> int:
        """Rows that a request may get in a step. What has this attribute is a diffusion model to vLLM."""
        # The first that vLLM reads of the configuration once --hf-overrides are in it.
        self._check_architectures()
        length = self.block_length
        if type(length) is not int:
            raise ValueError(
                f"block_length={length!r} is not allowed (block_size and bd_size are other names of it): give a whole "
                "number of at least 1 in config.json or --hf-overrides, or leave it out"
            )
        if self.geometry is not None:
            return self.geometry.canvas_length
        return length if self.traits.commit_predicts else 2 * length

    def _check_architectures(self) -> None:
        """Refuse a model class that is not the family's. Of vLLM's own classes the hook would never hear."""
        allowed = self.served.get(type(self).model_type)
        # vLLM takes the first.
        if allowed and self.architectures and self.architectures[0] not in allowed:
            raise ValueError(
                f"architectures={self.architectures!r} of config.json or --hf-overrides is not allowed for "
                f"{self.traits.family} models; allowed: {', '.join(sorted(allowed))}"
            )

    @property
    def diffusion_default_max_tokens(self) -> int | None:
        """``max_tokens`` of a request that gives none; for `vllm_dllm.patches.request_admission`.

        A model that sees the whole text sees the masks of the whole answer too, and answers with nothing where they
        are more than the model was trained on. ``None``: the rest of the context. ``max_new_tokens`` of the
        checkpoint's ``generation_config.json`` precedes this default.
        """
        if not self.traits.sees_whole_text:
            return None
        step_rows = self.geometry.step_rows if self.geometry else 2 * DEFAULT_MAX_TOKENS
        return max(min(DEFAULT_MAX_TOKENS, step_rows // 2), 1)

    @property
    def diffusion_canvas_graphs(self) -> bool:
        """Whether all rows of decoding requests are of groups of a block; for `vllm_dllm.patches.canvas_graphs`."""
        return not self.traits.sees_whole_text

    def to_dict(self) -> dict[str, Any]:
        """What can be written to ``config.json``: what the engine is cannot."""
        output = super().to_dict()
        output.pop("geometry", None)
        output.pop("guessed_block_length", None)
        return output

    def drafter(self, num_drafts: int, limit: int) -> "Drafter":
        """The model as a drafter of ``num_drafts`` tokens for texts of up to ``limit``."""
        from vllm_dllm.runtime.plan.drafter import Drafter

        assert self.block_length is not None and self.mask_token_id is not None
        context = self.traits.attention
        assert context != "causal", "refused when the engine starts"
        return Drafter(
            num_drafts=num_drafts,
            context=context,
            shifted=self.traits.shifted,
            mask_token_id=self.mask_token_id,
            sep_token_id=self.sep_token_id,
            block_length=self.block_length,
            limit=limit,
        )

    def draft_slots(self, num_drafts: int) -> int:
        """Rows of a request in its forward, as a drafter, over the target's; for the patch below.

        Raises:
            ValueError: the model was not asked for as a diffusion drafter.
        """
        if self.drafter_options is None:
            raise ValueError(
                f'{self.traits.family} models draft with "method": "dllm" in speculative_config, not "draft_model"'
            )
        return self.drafter(num_drafts, 0).extra_rows

    def draft_lookahead(self, num_drafts: int) -> int:
        """K/V slots behind those that the target has in a step; `vllm_dllm.patches.draft_model_speculators`."""
        return 1 + self.drafter(num_drafts, 0).rows_behind

    def validate_drafted_params(self, params: "SamplingParams") -> None:
        """Refuse log-probabilities of chosen tokens: vLLM's rejection sampler has those of the likeliest tokens alone.

        For `vllm_dllm.patches.draft_model_speculators`; over HTTP the answer is a status 400.
        """
        from vllm.exceptions import VLLMValidationError

        name, value = "logprob_token_ids", params.logprob_token_ids
        if value is not None:
            reason = f"{name} is not supported with a diffusion drafter: ask for likely tokens with `logprobs`."
            raise VLLMValidationError(reason, parameter=name, value=value)

    def validate_sampling_params(self, params: "SamplingParams") -> None:
        """Refuse what a request may not ask of any diffusion model; vLLM answers with HTTP 400."""
        from vllm_dllm.options.admission import validate_sampling_params

        validate_sampling_params(params, self.traits.family)

    def diffusion_validate_request(
        self, prompt_token_ids: Sequence[int], params: "SamplingParams", resumable: bool
    ) -> None:
        """Resolve the options of a request, its ``max_tokens`` known; for `vllm_dllm.patches.request_admission`."""
        from vllm_dllm.geometry import not_served
        from vllm_dllm.options.admission import admit_request, check_prompt

        if self.geometry is None:
            raise ValueError(not_served(self, self.name_or_path))
        check_prompt(prompt_token_ids, self.vocab_size)
        masks = np.flatnonzero(np.asarray(prompt_token_ids) == self.mask_token_id)
        admit_request(len(prompt_token_ids), params, self.geometry, masks=masks, resumable=resumable)

    diffusion_weights_empty_caches = True
    """For `vllm_dllm.patches.changed_weights`."""

    @property
    def diffusion_suffix_args(self) -> dict[str, Any]:
        """For `vllm_dllm.patches.completion_suffix`: request options of a completion with a ``suffix``."""
        return {"dllm_infill": "max_tokens"}

    def diffusion_render_suffix(self, prompt: str, suffix: str, tokenizer: Any) -> str:
        """The text of a completion with a ``suffix``: one mask token between the two.

        Raises:
            VLLMValidationError: the model cannot fill it in. Over HTTP the answer is a status 400.
        """
        from vllm_dllm.options.infill import text_with_mask

        assert self.mask_token_id is not None
        return text_with_mask(prompt, suffix, tokenizer, self.mask_token_id, self.traits)

    def diffusion_stream_events(self, args: dict[str, Any] | None, tokenizer: Any) -> StreamedEvents | None:
        """For `vllm_dllm.patches.stream_events`: the events of a request with these ``vllm_xargs``, if it wants any."""
        from vllm_dllm.options.errors import OptionError
        from vllm_dllm.options.schema import parse_request_options

        if not args or "dllm_step_events" not in args or tokenizer is None:
            return None
        try:
            wanted = parse_request_options(args).step_events
        except OptionError:  # the request is about to be refused
            return None
        return StreamedEvents(tokenizer) if wanted else None

    def resolve_speculative_config(
        self, speculative_config: dict[str, Any], additional_config: dict[str, Any] | None
    ) -> dict[str, Any]:
        """For `vllm_dllm.patches.speculative_methods`: ``additional_config`` with what the other asks for."""
        from vllm_dllm.options.speculative import lay_under_additional_config

        return lay_under_additional_config(speculative_config, additional_config)
