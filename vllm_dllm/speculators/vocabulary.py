"""Which tokens a drafter and its target share.

The drafter must not draft its own mask and separator, nor an id that means another token to the target. The softmax
over the logits of the other tokens renormalises the drafter's distribution. Real vocabularies need this: Qwen2.5 and
Qwen3 have embeddings of the same width, but ids from 151665 on differ, and a Qwen2.5 drafter's mask is Qwen3's
``<tool_response>``.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_dllm.options.drafter import DrafterOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig

MOST_DIFFERENT = 0.01
"""Share of the target's ids that may mean other tokens in the drafter's tokenizer."""


class VocabularyError(ValueError):
    """Drafter and target do not fit together; the message says why."""


class SharedVocabulary:
    """The tokens that may be drafted, as the drafter's forward uses them.

    Args:
        draft_ids: ``[target's vocabulary]`` int64, the drafter's id of every token; -1: the token is not shared.
        substitute: id that the drafter reads in place of a token that is not shared.
        num_draft_ids: width of the drafter's logits.

    Attributes:
        read_as: ``[target's vocabulary]`` int64, the drafter's id for every token of a text.
    """

    def __init__(self, draft_ids: torch.Tensor, substitute: int, num_draft_ids: int, device: torch.device) -> None:
        is_missing = draft_ids < 0
        has_own_id = (draft_ids == torch.arange(len(draft_ids))) | is_missing
        self.read_as = draft_ids.masked_fill(is_missing, substitute).to(device)
        self._missing = is_missing.nonzero().squeeze(1).to(device)
        self._gather: torch.Tensor | None = draft_ids.clamp(min=0).to(device)
        if num_draft_ids == len(draft_ids) and has_own_id.all():
            self._gather = None  # every column of the logits is where it should be

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's tokens: ``[rows, target's vocabulary]``. May change its argument.

        Args:
            logits: ``[rows, drafter's vocabulary]``.
        """
        if self._gather is not None:
            logits = logits.index_select(1, self._gather)
        return logits.index_fill_(1, self._missing, float("-inf"))


def share_vocabulary(
    target: Mapping[str, int] | None,
    drafter: Mapping[str, int] | None,
    *,
    num_target_ids: int,
    num_draft_ids: int,
    own_ids: Iterable[int],
) -> torch.Tensor:
    """Compare two tokenizers, id for id; ``draft_ids`` of `SharedVocabulary`.

    Args:
        target, drafter: ids of all tokens; ``None`` where there is no tokenizer, which is then taken for the other's.
        num_target_ids, num_draft_ids: rows of the embeddings.
        own_ids: ids that the drafter alone has a use for (mask, separator).

    Raises:
        VocabularyError: the embeddings differ in width, or the tokenizers in more than a few tokens.
    """
    if num_target_ids != num_draft_ids:
        raise VocabularyError(
            f"the drafter has embeddings for {num_draft_ids} tokens and the target for {num_target_ids}; a "
            "vocab_mapping says which ids mean the same"
        )
    draft_ids = torch.arange(num_target_ids)
    if target is not None and drafter is not None:
        in_target, in_drafter = ({index: token for token, index in ids.items()} for ids in (target, drafter))
        different = [
            index
            for index in sorted(in_target.keys() | in_drafter.keys())
            if in_target.get(index) != in_drafter.get(index) and index < num_target_ids
        ]
        if len(different) > MOST_DIFFERENT * len(in_target):
            first = different[0]
            raise VocabularyError(
                f"the drafter has another tokenizer than the target: {len(different)} of {len(in_target)} ids differ "
                f"(id {first} is {in_target.get(first)!r} in the target and {in_drafter.get(first)!r} in the drafter); "
                "a vocab_mapping says which ids mean the same"
            )
        draft_ids[torch.tensor(different, dtype=torch.long)] = -1
    draft_ids[torch.isin(draft_ids, torch.tensor(sorted(own_ids), dtype=torch.long))] = -1
    return draft_ids


def read_mapping(path: Path, *, num_target_ids: int, num_draft_ids: int, own_ids: Iterable[int]) -> torch.Tensor:
    """Read a mapping file, a JSON object from the drafter's ids, as strings, to the target's; ``draft_ids`` of
    `SharedVocabulary`.

    Raises:
        VocabularyError: the file is missing or malformed, an id is out of range, or two ids mean the same token.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise VocabularyError(f"vocab_mapping={str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of the text's encoding, too
        raise VocabularyError(f"vocab_mapping={str(path)!r} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise VocabularyError(f"vocab_mapping={str(path)!r} must be an object from the drafter's ids to the target's")
    own = set(own_ids)
    draft_ids = torch.full((num_target_ids,), -1, dtype=torch.long)
    for key, target_id in entries.items():
        valid = key.isdecimal() and int(key) < num_draft_ids and type(target_id) is int
        if not valid or not 0 <= target_id < num_target_ids:
            raise VocabularyError(
                f"vocab_mapping={str(path)!r} maps {key!r} to {target_id!r}; allowed: 0 to {num_draft_ids - 1}, as a "
                f"string, to 0 to {num_target_ids - 1}"
            )
        if int(key) in own:
            continue
        if draft_ids[target_id] >= 0:
            raise VocabularyError(f"vocab_mapping={str(path)!r} maps two ids to {target_id}")
        draft_ids[target_id] = int(key)
    if not (draft_ids >= 0).any():
        raise VocabularyError(f"vocab_mapping={str(path)!r} maps no token")
    return draft_ids


def mask_and_separator(hf_config: Any) -> list[int]:
    """Mask and separator of the drafter, which stand in no text."""
    ids = (hf_config.mask_token_id, hf_config.sep_token_id)
    return [index for index in ids if index is not None]


def mapped_ids(path: str, hf_config: Any, target: "ModelConfig") -> torch.Tensor:
    """`read_mapping` for a drafter with the configuration ``hf_config``."""
    return read_mapping(
        Path(path),
        num_target_ids=target.get_vocab_size(),
        num_draft_ids=hf_config.vocab_size,
        own_ids=mask_and_separator(hf_config),
    )


def draft_ids_of(config: "SpeculativeConfig") -> torch.Tensor:
    """``draft_ids`` of `SharedVocabulary`, in any process of the engine."""
    hf_config, target = config.draft_model_config.hf_config, config.target_model_config
    options = DrafterOptions.model_validate(hf_config.drafter_options)
    if options.vocab_mapping is not None:
        return mapped_ids(options.vocab_mapping, hf_config, target)
    draft_ids = torch.arange(target.get_vocab_size())
    draft_ids[list(options.missing_ids)] = -1
    return draft_ids


def shared_vocabulary_of(config: "SpeculativeConfig", device: torch.device) -> SharedVocabulary:
    """The tokens that drafter and target share.

    The drafter reads its end of text, or else token 0, in place of a token that it does not have.
    """
    hf_config = config.draft_model_config.hf_config
    eos = hf_config.eos_token_id
    substitute = (eos[0] if isinstance(eos, list) else eos) or 0
    return SharedVocabulary(draft_ids_of(config), substitute, hf_config.vocab_size, device)
