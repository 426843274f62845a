"""Prefix-conditioned fine-tuning: objective, packing and the command."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import get_scheduler

from tests.training.toys import config_of, qwen2_network
from vllm_dllm.tiny import train as tiny
from vllm_dllm.tiny.objectives import visible_keys
from vllm_dllm.tiny.text import train_tokenizer
from vllm_dllm.training import network as networks
from vllm_dllm.training import prefix_conditioned as pc
from vllm_dllm.training.data import TrainingError, encode
from vllm_dllm.training.layouts import load_network, network_config
from vllm_dllm.training.network import build_network
from vllm_dllm.training.trainer import batch_loss, parse_arguments

MASK = 9
PAD = 8


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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


def draw(example, seed=0, positions=None):
    return pc.draw(example, generator(seed), mask_token_id=MASK, pad_token_id=PAD, padding=3, positions=positions)


def drawn(seed=0):
    return [draw(example, 3 * seed + number) for number, example in enumerate(EXAMPLES[:3])]


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
def test_loss_and_gradients_of_packed_examples_are_the_mean_over_examples_and_their_positions(shift):
    for seed in range(3):
        network, plain = qwen2_network(), qwen2_network()
        examples = drawn(seed)
        assert len({example.inputs.shape[1] for example in examples}) > 1
        expected = loss_one_by_one(plain, examples, shift)
        loss = batch_loss(network, pc.pack(examples, shift))
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        for (name, one), other in zip(network.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=name)


class Fmha:
    """What ``xformers.ops.fmha`` computes, with a dense mask."""

    class BlockDiagonalMask:
        @staticmethod
        def from_seqlens(lengths, device):
            sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            return sequence.unsqueeze(1) == sequence

    @staticmethod
    def memory_efficient_attention(q, k, v, attn_bias):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias).transpose(1, 2)


def test_xformers_is_called_with_the_packed_sequences(monkeypatch):
    batch = pc.pack(drawn(), 0)
    expected = batch_loss(qwen2_network(), batch)
    monkeypatch.setattr(networks, "xformers_attention", lambda: Fmha)
    torch.testing.assert_close(batch_loss(qwen2_network(), batch), expected)


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        network = qwen2_network()
        if checkpointing:
            network.gradient_checkpointing_enable()
        network.train()
        batch_loss(network, pc.pack(drawn(), 0)).backward()
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_responses_are_followed_by_a_varying_number_of_padding_tokens():
    visits = [draw(EXAMPLES[0], seed, positions=4) for seed in range(50)]
    assert {visit.inputs.shape[1] for visit in visits} == {6, 7, 8, 9}
    assert max(len(visit.positions) for visit in visits) == 4
    assert (torch.cat([visit.targets for visit in visits]) == PAD).any()


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llada", "dream"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = config_of(
        request.param, vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["Mia has 17 apples. How many apples does Mia have now?"] * 3, 320)
    tiny.save_checkpoint(config, build_network(network_config(config)), tokenizer, folder)
    (folder / "README.md").write_text("about the source")
    return folder


SHORT = ("--use-cpu", "--max-steps", 2, "--per-device-train-batch-size", 2, "--positions", 2, "--warmup-steps", 0)


def tune(*arguments):
    pc.main([str(argument) for argument in arguments])


def complaint(capsys, *arguments):
    """What the command says of arguments that it refuses."""
    with pytest.raises(SystemExit) as refused:
        tune(*arguments)
    assert refused.value.code == 2
    return capsys.readouterr().err


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_the_command_writes_a_checkpoint_of_the_same_layout_with_other_weights(checkpoint, tmp_path):
    tune("--model", checkpoint, "--output-dir", tmp_path / "out", *SHORT, "--logging-steps", 1)
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert {k: (t.shape, t.dtype) for k, t in after.items()} == {k: (t.shape, t.dtype) for k, t in before.items()}
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (checkpoint / name).read_text()
    assert not (tmp_path / "out" / "README.md").exists()
    load_network(tmp_path / "out")
    assert len(losses(tmp_path / "out")) == 2


def write_data(path, *records):
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def test_data_is_one_epoch_by_default_in_whole_steps(checkpoint, tmp_path):
    records = [{"prompt": f"Mia has {n} apples.", "response": f"#### {n}"} for n in range(5)]
    data = write_data(tmp_path / "data.jsonl", *records)
    short = (*SHORT[:1], *SHORT[3:], "--gradient-accumulation-steps", 1, "--save-strategy", "no", "--logging-steps", 1)
    tune("--model", checkpoint, "--output-dir", tmp_path / "out", "--data", data, *short)
    assert len(losses(tmp_path / "out")) == 3


def test_prompts_get_the_chat_template_and_responses_the_end_token(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    (example,) = encode(tokenizer, [("How many?", "#### 3")], tokenizer.eos_token, 512)
    assert tokenizer.decode(example.tokens[: example.prompt_length]) == (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(example.tokens[example.prompt_length :]) == "#### 3<|im_end|>"


def test_long_examples_are_left_out_and_counted(checkpoint, caplog):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    pairs = [("How many?", "3"), ("How many?", "3" * 60)]
    assert len(encode(tokenizer, pairs, "", 60)) == 1
    assert "1 of 2 examples are longer than 60 tokens" in caplog.text
    with pytest.raises(TrainingError, match="all 2 examples are longer than 5 tokens"):
        encode(tokenizer, pairs, "", 5)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no examples"),
        (["{"], "line 1 is not JSON"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], 'line 2 must be an object with strings "prompt" and'),
    ],
)
def test_bad_data_is_refused_with_the_place(records, message, checkpoint, tmp_path, capsys):
    data = write_data(tmp_path / "data.jsonl", *records)
    arguments = ("--model", checkpoint, "--output-dir", tmp_path / "out", "--data", data, *SHORT)
    assert message in complaint(capsys, *arguments)


def test_what_cannot_be_trained_is_refused(checkpoint, tmp_path, capsys):
    out = ("--output-dir", tmp_path / "out")
    for arguments, message in (
        (("--model", tmp_path / "nowhere", *out), "is no checkpoint: it has no config.json"),
        (("--model", checkpoint, *out, "--data", tmp_path / "none.jsonl"), "there is no file"),
        (("--model", checkpoint, "--output-dir", checkpoint), "would be overwritten"),
        (("--model", tiny_sdar(tmp_path), *out), "only models with full attention"),
        (("--model", checkpoint, *out, "--padding", -1), "--padding=-1 must be at least 0"),
        (("--model", checkpoint, *out, "--problems", 0), "--problems=0 must be at least 1"),
        (("--model", checkpoint, *out, "--resume-from-checkpoint", "last"), "nothing to resume"),
        (("--model", checkpoint, *out, "--recipe", "huge-fef"), "is no file and not one of tiny-deer-distill"),
        (("--model", checkpoint, *out, "--recipe", recipe(tmp_path, "lr: 1")), "'lr' of --recipe"),
        (("--model", checkpoint, *out, "--recipe", recipe(tmp_path, "7", "number")), "must be a mapping"),
        (("--model", checkpoint, *out, "--recipe", recipe(tmp_path, "a: [", "broken")), "is not YAML"),
        (
            ("--model", checkpoint, *out, "--recipe", recipe(tmp_path, "data: a.jsonl", "one")),
            "there is no file a.jsonl",
        ),
        (out, "the following arguments are required: --model"),
    ):
        assert message in complaint(capsys, *arguments, *SHORT)


def recipe(folder, text, name="recipe"):
    (folder / name).write_text(text)
    return folder / name


def test_a_recipe_is_laid_between_defaults_and_options(tmp_path):
    values = recipe(
        tmp_path, f"model: somewhere\noutput_dir: {tmp_path}\nlearning_rate: 0.5\npositions: 3\nuse_cpu: true"
    )
    args = parse_arguments(pc.FefArguments, ["--recipe", str(values), "--positions", "4"])
    assert (args.model, args.learning_rate, args.positions, args.padding) == ("somewhere", 0.5, 4, 32)


def test_defaults_are_the_papers(tmp_path):
    args = parse_arguments(pc.FefArguments, ["--model", "m", "--output-dir", str(tmp_path), "--use-cpu"])
    assert (args.learning_rate, args.weight_decay, args.warmup_steps, args.num_train_epochs) == (1e-5, 0.1, 50, 1)
    assert args.train_batch_size * args.gradient_accumulation_steps * 8 == 16
    pc.decay_over_last_tenth(args, 1000)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(1000), 1000, args.lr_scheduler_kwargs
    )
    rates = []
    for _ in range(1001):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[50:900] == [1.0] * 850
    assert rates[950] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)
    assert rates[:50] == sorted(rates[:50])


def tiny_sdar(folder):
    (folder / "sdar").mkdir()
    (folder / "sdar" / "config.json").write_text('{"model_type": "sdar"}')
    return folder / "sdar"
