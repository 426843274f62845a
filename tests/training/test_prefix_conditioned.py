"""Prefix-conditioned fine-tuning: objective, packing, schedule, resumption and the command."""

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F
from typer.testing import CliRunner

from vllm_dllm.training import prefix_conditioned as pc
from vllm_dllm.training import runs, tiny
from vllm_dllm.training.full_attention import visible_keys
from vllm_dllm.training.layouts import load_network
from vllm_dllm.training.network import NetworkConfig, build_network, xformers_attention
from vllm_dllm.training.text import train_tokenizer

MASK = 9
PAD = 8
QUIET = Console(quiet=True)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def settings(**changes):
    values = {
        "steps": 12,
        "examples": 6,
        "batch_size": 2,
        "accumulate": 2,
        "positions": 4,
        "padding": 3,
        "learning_rate": 1e-2,
        "warmup": 2,
        "seed": 0,
        "packing": "padded",
    }
    return pc.Settings(**{**values, **changes})


def toy_network(seed=0):
    torch.manual_seed(seed)
    return build_network(
        NetworkConfig(
            vocab_size=10,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            qk_norm=False,
            qkv_bias=True,
        )
    )


EXAMPLES = [pc.Example(torch.arange(start, start + length) % 7, 2) for start, length in enumerate((6, 9, 7, 8, 6, 10))]


# --- objective ---------------------------------------------------------------------------------------------------


def test_corruption_masks_response_tokens_only_and_at_least_one():
    example = pc.Example(torch.arange(7), 5)
    counts = []
    for seed in range(300):
        corrupted = pc.corrupt(example, MASK, generator(seed))
        masked = corrupted == MASK
        assert not masked[:5].any()
        assert torch.equal(corrupted[~masked], example.tokens[~masked])
        counts.append(int(masked.sum()))
    assert min(counts) == 1
    # A uniform rate masks 0, 1 or 2 of two tokens a third of the time each; none becomes one.
    assert counts.count(1) / 300 == pytest.approx(2 / 3, abs=0.08)


def test_each_input_has_a_clean_prefix_and_the_corrupted_rest():
    clean = torch.tensor([1, 2, 3, 4, 5, 6])
    corrupted = torch.tensor([1, 2, MASK, 4, MASK, MASK])
    conditioned = pc.condition(clean, corrupted, None, generator())
    assert conditioned.positions.tolist() == [2, 4, 5]
    assert conditioned.targets.tolist() == [3, 5, 6]
    assert conditioned.inputs.tolist() == [
        [1, 2, MASK, 4, MASK, MASK],
        [1, 2, 3, 4, MASK, MASK],
        [1, 2, 3, 4, 5, MASK],
    ]


def test_with_many_masks_positions_are_drawn_uniformly_in_ascending_order():
    clean, corrupted = torch.arange(8), torch.full((8,), MASK)
    seen = torch.zeros(8)
    for seed in range(400):
        conditioned = pc.condition(clean, corrupted, 3, generator(seed))
        assert len(conditioned.positions) == 3
        assert conditioned.positions.tolist() == sorted(set(conditioned.positions.tolist()))
        seen[conditioned.positions] += 1
    assert (seen / 400).tolist() == pytest.approx([3 / 8] * 8, abs=0.08)


def drawn(count=3, seed=0):
    batches = pc.Batches(EXAMPLES, MASK, PAD, settings(batch_size=count, accumulate=1, positions=0, seed=seed))
    return batches[0][0]


def loss_one_by_one(network, examples, shift):
    """Eq. 4, one input at a time."""
    per_example = []
    for example in examples:
        losses = []
        for row, position, target in zip(*example, strict=True):
            ids = row.unsqueeze(0)
            length = len(row)
            mask = visible_keys(torch.tensor([length]), length)
            logits = network(ids, torch.arange(length).unsqueeze(0), mask, torch.ones_like(ids, dtype=torch.bool))
            losses.append(F.cross_entropy(logits[position - shift], target))
        per_example.append(torch.stack(losses).mean())
    return torch.stack(per_example).mean()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("packing", pc.PACKINGS)
def test_the_loss_of_packed_examples_is_the_mean_over_examples_and_their_positions(packing, shift):
    device = "cpu"
    if packing == "xformers":
        if xformers_attention() is None:
            pytest.skip("xformers' attention needs the package xformers and a CUDA device")
        device = "cuda"
    network = toy_network()
    for seed in range(3):
        examples = drawn(seed=seed)
        assert len({example.inputs.shape[1] for example in examples}) > 1
        expected = loss_one_by_one(network, examples, shift)
        loss = pc.prefix_conditioned_loss(network.to(device), pc.pack(examples, packing, shift, device))
        network.cpu()
        torch.testing.assert_close(loss.cpu(), expected)


def test_gradients_do_not_depend_on_the_packing():
    gradients = []
    for packing in ("padded", "blocks"):
        network = toy_network()
        pc.prefix_conditioned_loss(network, pc.pack(drawn(), packing, 0, "cpu")).backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


# --- the loop ----------------------------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_stays_and_falls_to_a_tenth():
    factors = [runs.schedule(step, 1000, 50) for step in range(1000)]
    assert factors[:50] == pytest.approx([(step + 1) / 50 for step in range(50)])
    assert factors[50:900] == [1.0] * 850
    assert factors[900:] == pytest.approx([1 - 0.9 * (step + 1) / 100 for step in range(100)])


def test_every_epoch_takes_each_example_once_in_another_order():
    order = runs.Order(6, seed=0)
    taken = [order[index] for index in range(12)]
    assert sorted(taken[:6]) == sorted(taken[6:]) == list(range(6))
    assert taken[:6] != taken[6:]


def test_responses_are_followed_by_a_varying_number_of_padding_tokens():
    batches = pc.Batches(EXAMPLES[:1], MASK, PAD, settings(batch_size=50, accumulate=1, examples=1))
    lengths = {example.inputs.shape[1] for example in batches[0][0]}
    assert lengths == {6, 7, 8, 9}
    targets = torch.cat([example.targets for example in batches[0][0]])
    assert (targets == PAD).any()


def tune(network, state=None, **kwargs):
    changes = kwargs.pop("settings", {})
    batches = pc.Batches(EXAMPLES, MASK, PAD, settings(**changes))
    return pc.fine_tune(network, batches, shift=0, device="cpu", console=QUIET, state=state, **kwargs)


def test_a_few_steps_lower_the_loss():
    repeated = [pc.Example(torch.full((length,), token), 2) for token, length in ((1, 6), (5, 8), (1, 7), (5, 9))]
    batches = pc.Batches(repeated, MASK, PAD, settings(steps=30, examples=4, padding=0))
    losses = pc.fine_tune(toy_network(), batches, shift=0, device="cpu", console=QUIET)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_one_large_batch_and_accumulated_small_ones_draw_the_same_examples():
    def examples(batch_size, accumulate):
        batches = pc.Batches(EXAMPLES, MASK, PAD, settings(batch_size=batch_size, accumulate=accumulate))
        return [example.inputs.tolist() for forward in batches[3] for example in forward]

    assert examples(4, 1) == examples(1, 4) == examples(2, 2)


def test_a_resumed_run_ends_in_the_same_weights(tmp_path):
    whole = toy_network()
    losses = tune(whole)
    cut_off = toy_network()
    tune(cut_off, tmp_path / "state.pt", save_every=5, stop_after=8)
    resumed = toy_network(seed=1)
    again = tune(resumed, tmp_path / "state.pt", save_every=5, resume=True)
    assert again == losses
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_run_is_not_resumed_with_other_settings_or_without_a_state(tmp_path):
    with pytest.raises(pc.TrainingError, match="nothing to resume"):
        tune(toy_network(), tmp_path / "state.pt", resume=True)
    tune(toy_network(), tmp_path / "state.pt", save_every=5, stop_after=5)
    with pytest.raises(pc.TrainingError, match=r"written with learning_rate=0\.01, not 0\.1"):
        tune(toy_network(), tmp_path / "state.pt", resume=True, settings={"learning_rate": 0.1})


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llada", "dream"])
def checkpoint(request, tmp_path_factory):
    family = tiny.FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    config = replace(family.recipe.network, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["Mia has 17 apples. How many apples does Mia have now?"] * 3, 320)
    tiny.save_checkpoint(family, build_network(replace(config, head_dim=16)), tokenizer, folder)
    (folder / "README.md").write_text("about the source")
    return folder


def invoke(*arguments):
    return CliRunner().invoke(pc.app, [str(argument) for argument in arguments])


SHORT = ("--steps", 2, "--batch-size", 2, "--accumulate", 1, "--positions", 2, "--warmup", 0)


def test_the_command_writes_a_checkpoint_of_the_same_layout_with_other_weights(checkpoint, tmp_path):
    result = invoke("--model", checkpoint, "--out", tmp_path / "out", *SHORT)
    assert result.exit_code == 0, result.output
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert {k: (t.shape, t.dtype) for k, t in after.items()} == {k: (t.shape, t.dtype) for k, t in before.items()}
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (checkpoint / name).read_text()
    assert not (tmp_path / "out" / "README.md").exists()
    load_network(tmp_path / "out")
    log = json.loads((tmp_path / "out" / "training" / "losses.json").read_text())
    assert len(log["losses"]) == 2
    assert log["settings"]["positions"] == 2
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "matplotlib" in result.output
    else:
        assert (tmp_path / "out" / "training" / "losses.png").read_bytes()[:4] == b"\x89PNG"


def write_data(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_data_is_one_epoch_by_default(checkpoint, tmp_path):
    records = [{"prompt": f"Mia has {n} apples.", "response": f"#### {n}"} for n in range(5)]
    data = write_data(tmp_path / "data.jsonl", *records)
    result = invoke("--model", checkpoint, "--out", tmp_path / "out", "--data", data, *SHORT[2:])
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "out" / "training" / "losses.json").read_text())["losses"]) == 3


def test_prompts_get_the_chat_template_and_responses_the_end_token(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    (example,) = pc.encode(tokenizer, [("How many?", "#### 3")], tokenizer.eos_token, 512)
    assert tokenizer.decode(example.tokens[: example.prompt_length]) == (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(example.tokens[example.prompt_length :]) == "#### 3<|im_end|>"


def test_long_examples_are_left_out_and_counted(checkpoint, caplog):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    pairs = [("How many?", "3"), ("How many?", "3" * 60)]
    assert len(pc.encode(tokenizer, pairs, "", 60)) == 1
    assert "1 of 2 examples are longer than 60 tokens" in caplog.text
    with pytest.raises(pc.TrainingError, match="all 2 examples are longer than 5 tokens"):
        pc.encode(tokenizer, pairs, "", 5)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no examples"),
        (["{"], "line 1 is not JSON"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], 'line 2 must be an object with strings "prompt" and'),
    ],
)
def test_bad_data_is_refused_with_the_place(records, message, tmp_path):
    data = write_data(tmp_path / "data.jsonl", *records)
    result = invoke("--model", tmp_path, "--out", tmp_path / "out", "--data", data)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_missing_model_missing_data_and_an_overwritten_model_are_refused(checkpoint, tmp_path):
    for arguments, message in (
        (("--model", tmp_path / "nowhere", "--out", tmp_path), "is no checkpoint: it has no config.json"),
        (("--model", checkpoint, "--out", tmp_path, "--data", tmp_path / "none.jsonl"), "there is no file"),
        (("--model", checkpoint, "--out", checkpoint), "would be overwritten"),
        (("--model", checkpoint, "--out", tmp_path, "--packing", "xformers"), "needs the package xformers and a CUDA"),
        (("--model", checkpoint, "--out", tmp_path, "--packing", "tight"), "is not one of auto, padded"),
        (("--model", tiny_sdar(tmp_path), "--out", tmp_path / "out"), "only models with full attention"),
    ):
        result = invoke(*arguments, *SHORT)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def tiny_sdar(folder):
    (folder / "sdar").mkdir()
    (folder / "sdar" / "config.json").write_text('{"model_type": "sdar"}')
    return folder / "sdar"


OWN_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PreTrainedConfig):
    model_type = "llada"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(320, 16)
        self.head = torch.nn.Linear(16, 320)
        self.post_init()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return CausalLMOutput(logits=self.head(x + x.mean(1, keepdim=True)))
"""


def test_a_checkpoint_with_code_of_its_own_is_run_by_it(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(source)
    (source / "own_code.py").write_text(OWN_CODE)
    config = {
        "model_type": "llada",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"},
        "mask_token_id": 3,
    }
    (source / "config.json").write_text(json.dumps(config))
    namespace = {"__name__": "own_code"}
    exec(OWN_CODE, namespace)
    torch.manual_seed(0)
    model = namespace["OwnModel"](namespace["OwnConfig"]())
    from safetensors.torch import save_file

    save_file(model.state_dict(), source / "model.safetensors", metadata={"format": "pt"})
    result = invoke("--model", source, "--out", tmp_path / "out", *SHORT)
    assert result.exit_code == 0, result.output
    log = json.loads((tmp_path / "out" / "training" / "losses.json").read_text())
    assert (log["settings"]["batch_size"], log["settings"]["accumulate"]) == (1, 2)
    tuned = pc.ReleasedNetwork(tmp_path / "out").model
    assert type(tuned).__name__ == "OwnModel"
    assert not torch.equal(tuned.embed.weight, model.embed.weight)


def test_the_models_own_code_is_never_given_inputs_of_different_lengths():
    network = pc.ReleasedNetwork.__new__(pc.ReleasedNetwork)
    packed = pc.pack(drawn(), "padded", 0, "cpu")
    with pytest.raises(ValueError, match="different lengths"):
        pc.ReleasedNetwork.forward(network, packed.input_ids, packed.positions, packed.mask, packed.rows)
