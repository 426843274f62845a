"""Tokenizers that checkpoints have as remote code alone, as classes of Transformers. Nothing here imports vLLM."""

from typing import Any

from transformers import AddedToken, AutoTokenizer, Qwen2Tokenizer

from vllm_dllm.models.base_config import BlockDiffusionConfig


class DreamTokenizer(Qwen2Tokenizer):
    """The tokenizer of Dream, Dream-Coder and DiffuCoder: Qwen2's under another name.

    The checkpoints have ``vocab.json`` and ``merges.txt``, and for them a slow class in Python, which structured
    outputs cannot use.

    Raises:
        ValueError: an added token has an id that does not follow the vocabulary, and would silently get another.
    """

    def __init__(self, *args: Any, added_tokens_decoder: dict[int, AddedToken] | None = None, **kwargs: Any):
        super().__init__(*args, added_tokens_decoder=added_tokens_decoder, **kwargs)
        for number, token in (added_tokens_decoder or {}).items():
            found = self.convert_tokens_to_ids(str(token))
            if found != number:
                raise ValueError(
                    f"tokenizer_config.json gives the added token {token} the id {number}, and here it has {found}: "
                    "ids of added tokens must follow those of vocab.json without a gap"
                )


def register_tokenizers() -> None:
    """Have Transformers take `DreamTokenizer` wherever ``tokenizer_config.json`` names it, without remote code."""
    # Under the configuration of the checkpoints, Transformers would take the remote code where that is trusted. By its
    # name alone a class comes first, so the configuration is one that no checkpoint has.
    AutoTokenizer.register(BlockDiffusionConfig, DreamTokenizer, exist_ok=True)
