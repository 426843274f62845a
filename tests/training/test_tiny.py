"""The tiny models: reproducible training, released layout, and the accuracy of the committed checkpoint."""

import json
import shutil
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from tests.paths import CHECKPOINTS
from tests.training.toys import RECIPES, config_of, qwen2_network, text_of
from vllm_dllm.tiny import train as tiny
from vllm_dllm.tiny.arithmetic import THINGS, make_problems
from vllm_dllm.tiny.evaluation import solve
from vllm_dllm.tiny.muon import MuonAndAdamW
from vllm_dllm.tiny.text import MASK, SPECIAL_TOKENS, render_prompt
from vllm_dllm.training.layouts import load_network
from vllm_dllm.training.network import Network
from vllm_dllm.training.objectives import IGNORE, block_mask
from vllm_dllm.training.trainer import parse_arguments, read_recipe

COMMITTED = CHECKPOINTS / "tiny-sdar"
FULL_ATTENTION = ("llada", "dream")

TEXT = {"chats": 2, "library_modules": 5, "tokenizer_problems": 200, "length": 128}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


class Trained(NamedTuple):
    network: Network
    tokenizer: Tokenizer


def train_toy(folder, seed, *options, recipe="sdar", text=TEXT, **sizes):
    """A few steps of a recipe, with less text and a smaller network."""
    words = [
        "--recipe", f"tiny-{recipe}", "--output-dir", folder, "--seed", seed, "--max-steps", 3, "--warmup-steps", 0,
        "--text", json.dumps(text), "--config", json.dumps(config_of(recipe, **(sizes or SIZES))), *options,
    ]  # fmt: skip
    return Trained(*tiny.train(parse_arguments(tiny.TinyArguments, [str(word) for word in words])))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return train_toy(tmp_path_factory.mktemp("run"), seed=1)


@pytest.fixture(scope="module")
def checkpoint(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    tiny.save_checkpoint(config_of("sdar", **SIZES), toy.network, toy.tokenizer, folder)
    return folder


def test_training_twice_with_one_seed_gives_the_same_tokenizer_and_weights(toy, tmp_path):
    again = train_toy(tmp_path, seed=1)
    assert again.tokenizer.to_str() == toy.tokenizer.to_str()
    for name, tensor in again.network.state_dict().items():
        assert torch.equal(tensor, toy.network.state_dict()[name]), name


def test_another_seed_gives_other_weights(toy, tmp_path):
    other = train_toy(tmp_path, seed=2).network.state_dict()
    assert not torch.equal(other["lm_head.weight"], toy.network.state_dict()["lm_head.weight"])


def test_embeddings_begin_with_the_deviation_that_is_asked_for(tmp_path):
    network = train_toy(tmp_path, 1, "--embedding-deviation", 0.5, "--learning-rate", 1e-9).network
    assert network.model.embed_tokens.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert network.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_a_resumed_run_ends_in_the_same_weights(toy, tmp_path):
    train_toy(tmp_path, 1, "--save-steps", 2)
    shutil.rmtree(tmp_path / "checkpoint-3")
    again = train_toy(tmp_path, 1, "--save-steps", 2, "--resume-from-checkpoint", "last")
    for name, tensor in again.network.state_dict().items():
        assert torch.equal(tensor, toy.network.state_dict()[name]), name


def test_muon_moves_matrices_and_adamw_the_rest_each_at_its_own_rate():
    network = qwen2_network()
    optimizer = MuonAndAdamW(network, learning_rate=0.5, matrix_learning_rate=0.25)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in network.named_parameters():
        assert rates[id(parameter)] == (0.25 if ".layers." in name and parameter.dim() == 2 else 0.5), name


def test_weights_are_saved_in_bfloat16_under_the_released_names_without_loss(toy, checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with torch.device("meta"):
        released = Qwen3ForCausalLM(qwen3_config(checkpoint)).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in released.items()
    }
    for name, tensor in toy.network.state_dict().items():
        assert torch.equal(tensors[name].float(), tensor), name


def qwen3_config(folder):
    config = json.loads((folder / "config.json").read_text())
    return Qwen3Config(**{key: value for key, value in config.items() if key not in ("model_type", "architectures")})


def load_qwen3(folder):
    model = Qwen3ForCausalLM(qwen3_config(folder)).float()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.eval()


@pytest.mark.parametrize("which", ["toy", "committed"])
def test_logits_equal_those_of_transformers_qwen3_under_the_block_mask(which, checkpoint):
    folder = checkpoint if which == "toy" else COMMITTED
    qwen3 = load_qwen3(folder)
    vocab_size = qwen3.config.vocab_size
    network = load_network(folder)
    ids = torch.randint(vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(48).unsqueeze(0)
    mask = block_mask(positions // 16, torch.zeros_like(positions))
    additive = torch.zeros(2, 1, 48, 48).masked_fill(~mask.unsqueeze(1), torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = qwen3(input_ids=ids, position_ids=positions.expand(2, -1), attention_mask=additive).logits
        logits = network(ids, positions, mask, torch.ones_like(ids, dtype=torch.bool)).view_as(expected)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_the_checkpoint_states_block_length_mask_and_stop_ids(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert config["architectures"] == ["SDARForCausalLM"]
    assert config["model_type"] == "sdar"
    assert config["block_size"] == 16
    assert config["mask_token_id"] == tokenizer.convert_tokens_to_ids(MASK)
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text",
    [
        "Mia has 17 apples.",
        "def f(x):\n    return x ** 2\n",
        "naïve — 数学 🙂",
        "  \t\n\n trailing  ",
        "12345",
    ],
)
def test_text_survives_the_tokenizer(checkpoint, text):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numbers_are_spelled_digit_by_digit(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]


def test_special_tokens_are_single_ids_and_left_out_of_decoded_text(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><|endoftext|>"), skip_special_tokens=True) == "a"


def test_the_chat_template_renders_the_prompt_of_the_training_text(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": "How many?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == render_prompt("How many?")
    messages.append({"role": "assistant", "content": "#### 3"})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n#### 3<|im_end|>\n"
    )


SHORT_TEXT = {
    "chats": 8, "long_every": 2, "library_modules": 5, "tokenizer_problems": 200, "length": 128,
}  # fmt: skip


def toy_batches(recipe, count=4):
    return tiny.Batches(tiny.Text(**SHORT_TEXT), config_of(recipe, vocab_size=512), 0, count)


@pytest.mark.parametrize("recipe", FULL_ATTENTION)
def test_windows_of_full_attention_end_at_random_places_behind_the_answer(recipe):
    batches = toy_batches(recipe)
    seen = []
    for step in range(4):
        batch = batches[step]
        chosen = slice(step * 8, step * 8 + len(batch.input_ids))
        chats, prompt_lengths = batches.chats.tokens[chosen], batches.chats.prompt_lengths[chosen]
        answer_ends = (chats != batches.end_of_text).sum(1)
        ends = batch.mask[:, 0].sum(1)  # keys that the first row sees
        assert (ends >= answer_ends).all()
        masked = batch.input_ids == batches.config["mask_token_id"]
        places = torch.arange(masked.shape[1])
        assert not (masked & (places < prompt_lengths.unsqueeze(1))).any()
        assert not (masked & (places >= ends.unsqueeze(1))).any()
        length, count = (320, 3) if step % 2 else (128, 8)
        assert batch.input_ids.shape == (count, length)
        seen += (ends - answer_ends).tolist()
    assert len(set(seen)) > 10
    assert max(seen) > 128


@pytest.mark.parametrize("recipe", FULL_ATTENTION)
def test_training_a_full_attention_family_twice_gives_the_same_weights(recipe, tmp_path):
    sizes = {"vocab_size": 512, "num_hidden_layers": 1}
    first, second = (train_toy(tmp_path / name, 1, recipe=recipe, text=SHORT_TEXT, **sizes) for name in "ab")
    for name, tensor in second.network.state_dict().items():
        assert torch.equal(tensor, first.network.state_dict()[name]), name


def test_the_command_writes_a_checkpoint(tmp_path, capsys):
    tiny.main(
        [
            "--recipe",
            "tiny-sdar",
            "--output-dir",
            str(tmp_path),
            "--max-steps",
            "1",
            "--held-out",
            "0",
            "--text",
            json.dumps(TEXT),
            "--config",
            json.dumps(config_of("sdar", **SIZES)),
        ]
    )
    assert "parameters, 1 steps" in capsys.readouterr().out
    assert load_network(tmp_path).config.hidden_size == SIZES["hidden_size"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", '{"chat": 3}'), "'chat' of text is not one of chats, length"),
        (("--config", '{"model_type": "mamba", "vocab_size": 300}'), "model_type='mamba' is not one of sdar, "),
        (("--max-steps", "-1"), "--max-steps must be given"),
        (("--embedding-deviation", "0"), "--embedding-deviation=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_can(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tiny.main(["--recipe", "tiny-sdar", "--output-dir", str(tmp_path), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_states_all_that_its_model_needs(name, tmp_path):
    args = parse_arguments(tiny.TinyArguments, ["--recipe", f"tiny-{name}", "--output-dir", str(tmp_path)])
    assert args.max_steps >= 1000
    assert args.text_and_config == (text_of(name), config_of(name))


def test_batches_do_not_depend_on_those_that_were_asked_for():
    batches = toy_batches("llada")
    whole = [batches[number].input_ids for number in range(4)]
    for number in (3, 1, 2):
        assert torch.equal(batches[number].input_ids, whole[number])


def test_the_committed_checkpoint_is_small_enough_for_git():
    assert (COMMITTED / "model.safetensors").stat().st_size <= 6_500_000


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_the_committed_checkpoints_of_full_attention_are_smaller_still(name):
    assert (CHECKPOINTS / f"tiny-{name}" / "model.safetensors").stat().st_size <= 2_500_000


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "qwen2-small"])
def test_recipes_have_the_configurations_of_the_committed_checkpoints(name):
    folder = CHECKPOINTS / f"tiny-{name}"
    assert config_of(name) == json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.get("max_new_tokens") == read_recipe(f"tiny-{name}").get("max_new_tokens")


def test_the_committed_pair_for_speculation_is_small_has_one_tokenizer_and_spare_rows():
    target, drafter = CHECKPOINTS / "tiny-qwen2", CHECKPOINTS / "tiny-deer"
    sizes = [file.stat().st_size for folder in (target, drafter) for file in folder.iterdir()]
    assert sum(sizes) <= 1_300_000
    assert (target / "tokenizer.json").read_bytes() == (drafter / "tokenizer.json").read_bytes()
    used = set(Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab().values())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (target, drafter)]
    assert configs[0]["vocab_size"] == configs[1]["vocab_size"]
    for key in ("mask_token_id", "sep_token_id"):
        assert configs[1][key] not in used
        assert configs[1][key] < configs[1]["vocab_size"]


def test_the_autoregressive_families_have_one_tokenizer():
    tokenizers = [
        tiny.Batches(text_of(name, tokenizer_problems=200), config_of(name), 0, 1).tokenizer.to_str()
        for name in ("qwen2", "qwen2-small")
    ]
    assert tokenizers[0] == tokenizers[1]


def test_autoregressive_training_predicts_each_answer_token_and_the_end_from_what_is_before_it():
    batches = tiny.Batches(text_of("qwen2", chats=8, tokenizer_problems=200, length=128), config_of("qwen2"), 0, 1)
    batch = batches[0]
    assert torch.equal(batch.mask[0], torch.ones(128, 128, dtype=torch.bool).tril())
    for row, targets, start in zip(batch.input_ids, batch.targets, batches.chats.prompt_lengths.tolist(), strict=True):
        end = row[start:].tolist().index(batches.tokenizer.token_to_id("<|im_end|>")) + start
        assert torch.equal(targets[start - 1 : end], row[start : end + 1])
        assert (targets[: start - 1] == IGNORE).all()
        assert (targets[end:] == IGNORE).all()


@pytest.mark.slow
def test_the_committed_tiny_llada_names_the_things_of_the_question():
    problems = make_problems(24, tiny.HELD_OUT_SEED, "test")
    llm = LLM(
        str(CHECKPOINTS / "tiny-llada"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
    )
    prompts = [render_prompt(problem.question) for problem in problems]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
    named = [
        (thing, problem.question)
        for output, problem in zip(outputs, problems, strict=True)
        for thing in THINGS
        if thing in output.outputs[0].text
    ]
    assert named
    for thing, question in named:
        assert thing in question


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("sdar", 0.8), ("llada", 0.6), ("qwen2", 0.8)])
def test_the_engine_solves_held_out_problems_with_the_committed_checkpoint(name, least):
    figures = solve(CHECKPOINTS / f"tiny-{name}", make_problems(24, tiny.HELD_OUT_SEED, "test"))
    assert len(figures) == (1 if name == "qwen2" else 2)
    for policy, (accuracy, speed) in figures.items():
        assert accuracy >= least, policy
        assert speed >= 1.5 if policy == "threshold 0.9" else speed <= 1
