"""Make a diffusion drafter of an autoregressive checkpoint: rows for the mask and [SEP], and Open-dCoder's layout."""

import json
from pathlib import Path
from typing import Any

import torch

from vllm_dllm.training.alignment import Context, DrafterIds
from vllm_dllm.training.data import TrainingError, load_tokenizer
from vllm_dllm.training.layouts import load_network, read_config
from vllm_dllm.training.network import Network
from vllm_dllm.training.trainer import copy_other_files, write_weights


def spare_rows(tokenizer: Any, rows: int) -> list[int]:
    """Rows of the embedding that no token has, the last first.

    The last ones, because a target of the same family may have given the first ones to tokens of its own (Qwen3 uses
    four rows that are spare in Qwen2.5).
    """
    used = set(tokenizer.get_vocab().values())
    return [row for row in reversed(range(rows)) if row not in used]


@torch.no_grad()
def add_rows(network: Network, new: list[int], rows: int, seed: int) -> None:
    """Give the network ``rows`` rows of the embedding, and initialise those of ``new`` ids.

    Rows of new ids become the mean of the other rows, plus noise of a tenth of the spread of those rows. The noise
    tells the mask from [SEP]; neither means anything at first.
    """
    generator = torch.Generator().manual_seed(seed)
    network.resize_token_embeddings(rows, mean_resizing=False)
    known = torch.tensor([row for row in range(rows) if row not in new])
    head = () if network.config.tie_word_embeddings else (network.lm_head.weight,)
    for weight in (network.model.embed_tokens.weight, *head):
        mean, spread = weight[known].mean(0), weight[known].std(0)
        for row in new:
            weight[row] = mean + 0.1 * spread * torch.randn(len(mean), generator=generator)


def check_tokenizers(drafter: Any, target: Any) -> None:
    """Refuse tokenizers that do not give the drafter's tokens the same ids.

    Raises:
        TrainingError: they differ.
    """
    own, other = drafter.get_vocab(), target.get_vocab()
    different = [token for token, number in own.items() if other.get(token) != number]
    if different:
        examples = ", ".join(f"{token!r} ({own[token]}, target: {other.get(token)})" for token in different[:3])
        raise TrainingError(f"{len(different)} tokens have other ids in the target's tokenizer: {examples}")


def convert_checkpoint(
    model: Path, out: Path, *, target: Path | None, context: Context, sep: bool, mask_token_id: int | None, seed: int
) -> DrafterIds:
    """Write a drafter that computes what ``model`` does, with rows for the mask and [SEP].

    Args:
        model: checkpoint in Qwen2's layout.
        target: whose tokenizer the drafter gets; ``None``: the model's own.
        mask_token_id: row of a mask that the model knows already; it stays as it is.
    """
    config = read_config(model)
    if config.get("model_type") not in ("qwen2", "open_dcoder"):
        raise TrainingError(f"model_type={config.get('model_type')!r} of {model}: only Qwen2's layout can be converted")
    if out.resolve() in (model.resolve(), target.resolve() if target else None):
        raise TrainingError("--out is the folder of a model, which would be overwritten")
    network = load_network(model)
    rows = network.config.vocab_size
    tokenizer = load_tokenizer(target or model)
    if target is not None:
        check_tokenizers(load_tokenizer(model), tokenizer)
    if mask_token_id is not None and not 0 <= mask_token_id < rows:
        raise TrainingError(f"--mask-token-id={mask_token_id} is not one of the {rows} rows")
    wanted = sep + (mask_token_id is None)
    spare = [row for row in spare_rows(tokenizer, rows) if row != mask_token_id][:wanted]
    added = list(range(rows, rows + wanted - len(spare)))
    new = spare + added
    add_rows(network, new, rows + len(added), seed)
    mask = new[0] if mask_token_id is None else mask_token_id
    ids = DrafterIds(mask=mask, sep=new[-1] if sep else None, context=context)
    out.mkdir(parents=True, exist_ok=True)
    (out / "vocab_mapping.json").unlink(missing_ok=True)  # of an earlier drafter
    copy_other_files(model, out)
    for name in _TOKENIZER_FILES:
        if target is not None and (target / name).is_file():
            (out / name).write_bytes((target / name).read_bytes())
    drafter = {
        **config,
        "architectures": ["OpenDCoderModel"],
        "model_type": "open_dcoder",
        "vocab_size": network.config.vocab_size,
        "mask_token_id": ids.mask,
        "context_attention": context,
    }
    drafter.pop("sep_token_id", None)
    if ids.sep is not None:
        drafter["sep_token_id"] = ids.sep
    (out / "config.json").write_text(json.dumps(drafter, indent=2, sort_keys=True) + "\n")
    if added:
        used = sorted(number for number in tokenizer.get_vocab().values() if number < rows)
        (out / "vocab_mapping.json").write_text(json.dumps({str(number): number for number in used}) + "\n")
    write_weights(network.state_dict(), model, out)
    return ids


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
