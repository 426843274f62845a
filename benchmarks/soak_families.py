"""The model families of the soak: checkpoints, options of engines, and what requests may ask for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record import CHECKPOINTS
from serving import MAX_DRAFTS, MAX_MODEL_LEN, MAX_NUM_SEQS

Options = Mapping[str, str | int | float]
"""``vllm_xargs`` of a request."""

STATIC: Options = {"dllm_policy": "static"}
THRESHOLD: Options = {"dllm_policy": "threshold", "dllm_threshold": 0.9}
PLAIN: tuple[Options, ...] = (
    {},
    STATIC,
    {"dllm_policy": "static", "dllm_tokens_per_step": 3},
    {"dllm_policy": "static", "dllm_denoising_steps": 5},
    THRESHOLD,
    {"dllm_policy": "threshold", "dllm_threshold": 0.5, "dllm_eos_early_stop": 0},
    {"dllm_policy": "sequential", "dllm_tokens_per_step": 2},
    {"dllm_policy": "entropy", "dllm_entropy_bound": 1.0},
    {"dllm_policy": "localleap"},
    {"dllm_policy": "factor"},
    {"dllm_policy": "hierarchy"},
    {"dllm_policy": "random", "dllm_tokens_per_step": 2},
    {"dllm_policy": "maskgit_plus", "dllm_denoising_steps": 6, "dllm_alg_temp": 0.5},
    {"dllm_policy": "topk_margin", "dllm_denoising_steps": 6},
)
"""Policies of requests without drafts."""
DRAFTING: tuple[Options, ...] = (
    STATIC,
    THRESHOLD,
    {"dllm_policy": "threshold", "dllm_threshold": 0.5},
    {"dllm_policy": "sequential"},
    {"dllm_policy": "entropy", "dllm_entropy_bound": 0.5},
    {"dllm_policy": "localleap"},
)
"""Policies of requests with drafts."""
VERIFIERS: tuple[Options, ...] = (
    {"dllm_verify": "freedave"},
    {"dllm_verify": "freedave", "dllm_drafts": 4},
    {"dllm_verify": "freedave", "dllm_drafts": "auto"},
    {"dllm_verify": "freedave", "dllm_drafts": 5, "dllm_match": "subset"},
    {"dllm_verify": "spiffy"},
    {"dllm_verify": "spiffy", "dllm_drafts": 7},
    {"dllm_verify": "spiffy", "dllm_drafts": "auto"},
    {"dllm_verify": "psd"},
    {"dllm_verify": "psd", "dllm_drafts": 6},
)
FEF: tuple[Options, ...] = (
    {"dllm_verify": "fef", "dllm_window": 8},
    {"dllm_verify": "fef", "dllm_window": 4, "dllm_resample_steps": 1},
    {"dllm_verify": "fef", "dllm_window": 6, "dllm_resample_steps": 3, "dllm_remask": 0.3},
)
"""A verifier that is its own policy."""

_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Family:
    """A model family under load.

    Attributes:
        checkpoint: folder of the bundled model.
        engine: arguments of ``vllm.LLM``, and flags of ``vllm serve``.
        plain: policies of requests without drafts.
        drafting: policies that requests with one of ``verifiers`` have.
        own: options of decodings that need no policy.
        without: fields of ``EXTRAS`` and sampling parameters that its requests may not have.
        special: tokens that no prompt is to hold.
    """

    name: str
    checkpoint: Path
    engine: dict[str, Any] = field(hash=False)
    plain: tuple[Options, ...]
    drafting: tuple[Options, ...] = ()
    verifiers: tuple[Options, ...] = ()
    own: tuple[Options, ...] = ()
    without: tuple[str, ...] = ()
    special: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def flags(self) -> dict[str, str]:
        """``engine`` as flags of ``vllm serve``."""
        return {
            "--" + name.replace("_", "-"): json.dumps(value) if isinstance(value, dict) else str(value)
            for name, value in self.engine.items()
        }


def _engine(pages: int, pages_of_a_draft: int, **more: Any) -> dict[str, Any]:
    """Few ``pages`` for requests, so that some have to make room for others, and those of all drafts."""
    return {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "num_gpu_blocks_override": pages + pages_of_a_draft * MAX_DRAFTS * MAX_NUM_SEQS,
        "additional_config": {"dllm": {"max_drafts": MAX_DRAFTS}},
        **more,
    }


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sdar",
            checkpoint=CHECKPOINTS / "tiny-sdar",
            engine=_engine(pages=112, pages_of_a_draft=1),
            plain=PLAIN,
            drafting=DRAFTING,
            verifiers=VERIFIERS,
            own=FEF,
        ),
        Family(
            name="llada",
            checkpoint=CHECKPOINTS / "tiny-llada",
            # A draft may begin in the midst of a page.
            engine=_engine(pages=144, pages_of_a_draft=2),
            plain=PLAIN,
            drafting=DRAFTING,
            verifiers=VERIFIERS,
            own=FEF,
        ),
        Family(
            name="deer",
            checkpoint=CHECKPOINTS / "tiny-qwen2",
            # Pages for all: drawn tokens depend on where rounds begin, and a preemption moves that.
            engine={
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": MAX_NUM_SEQS,
                "max_num_batched_tokens": 2048,
                "kv_cache_memory_bytes": _KV_CACHE_BYTES,
                "speculative_config": {
                    "method": "dllm",
                    "model": str(CHECKPOINTS / "tiny-deer"),
                    "num_speculative_tokens": 8,
                },
            },
            plain=({},),
            # vLLM's own refusals where drafts are verified.
            without=("min_p", "logit_bias"),
        ),
    )
}
