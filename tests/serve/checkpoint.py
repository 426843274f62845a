"""The model that is served: the repository's own or, where that is missing, a random one."""

import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vllm_dllm.training.text import CHAT_TEMPLATE, END_OF_TEXT, MASK

BUNDLED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-sdar"


def add_tokenizer(weights: Path, folder: Path) -> Path:
    """Put a tokenizer beside the weights of a golden checkpoint, whose last tokens are end of text and mask.

    Every token is one to three ASCII characters, so that any sequence of tokens is text.
    """
    folder.mkdir()
    for file in weights.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((weights / "config.json").read_text())
    characters = [*string.printable[:95], "\n"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = [byte_level.pre_tokenize_str(character)[0][0] for character in characters]
    letters = string.ascii_lowercase
    merges = [(first, second) for first in letters for second in letters]
    merges = merges[: config["vocab_size"] - len(vocabulary) - 2]
    vocabulary += ["".join(merge) for merge in merges]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, MASK])
    assert tokenizer.token_to_id(END_OF_TEXT) == config["eos_token_id"]
    assert tokenizer.token_to_id(MASK) == config["mask_token_id"]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return folder
