"""Trains the tiny I-DLM checkpoint of this folder, in four minutes on a processor."""

import json
from pathlib import Path

import torch
from tqdm import trange
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, MASK, EOS, MOST_MASKS, LENGTH, BATCH, STEPS = 320, 100, 11, 5, 96, 24, 1500
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def text_of(length: int, generator: torch.Generator) -> list[int]:
    """Runs of numbers with a step each; ``tests.engine.runtime.test_nemotron`` has the same texts."""
    text: list[int] = []
    while len(text) < length:
        bounds = ((0, 200), (1, 6), (4, 20))
        first, step, number = (int(torch.randint(*each, (1,), generator=generator)) for each in bounds)
        text += [1, 12 + step, *[101 + (first + step * index) % 218 for index in range(number)]]
    return text[:length]


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(7)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG, dtype="float32"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    for _ in trange(STEPS):
        clean = torch.tensor([text_of(LENGTH, generator) for _ in range(BATCH)])
        # The same texts with masks behind a token, each of which is to say the token behind its place.
        start = torch.randint(LENGTH - MOST_MASKS - 1, (BATCH, 1), generator=generator)
        columns = torch.arange(LENGTH)
        is_mask = (columns > start) & (columns <= start + MOST_MASKS)
        both = torch.cat((clean, torch.where(is_mask, MASK, clean)))
        targets = clean.roll(-1, dims=1).repeat(2, 1)
        # What comes behind the masks has no part in it.
        counts = torch.cat((torch.ones_like(is_mask), columns <= start + MOST_MASKS)) & (columns < LENGTH - 1)
        loss = torch.nn.functional.cross_entropy(model(both).logits[counts], targets[counts])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    folder = Path(__file__).parent / "checkpoint"
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config = {**CONFIG, "architectures": ["SDARForCausalLM"], "model_type": "sdar", "dtype": "float32"}
    config |= {"block_size": 3, "mask_token_id": MASK, "rms_norm_eps": 1e-6, "use_regular_causal": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"loss {loss.item():.3f}, {folder}")


if __name__ == "__main__":
    main()
