"""A PEFT model made lean by one call is trained by transformers' Trainer and TRL's SFTTrainer as the stock model is.

Both trainers run unchanged; each update's loss and the adapter's weights after the last are compared with those of the
same trainer on the same model before the call. Float32, relative: losses 1e-5, weight changes 1e-3.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from tests.fixtures_tokenizers import tiny_tokenizer
from tests.tiny_models import randomize_adapter, tiny_network
from traceforge.config import AdapterSettings
from traceforge.errors import ModelError, TrainingError
from traceforge.models import drop_in
from traceforge.models.adapters import add_adapter
from traceforge.models.drop_in import make_lean
from traceforge.samples.rows import Path

UPDATES = 4
OPTIONS = {
    "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": UPDATES, "logging_steps": 1,
    "learning_rate": 1e-2, "report_to": [], "save_strategy": "no", "use_cpu": True, "seed": 3,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True, "max_grad_norm": 1.0,
    "adam_epsilon": 1e-6,  # weights whose gradient is rounding noise stay still
}  # fmt: skip


def adapted(family: str = "llama", **changes):
    network = tiny_network(family, **changes)
    network.requires_grad_(False)
    model = add_adapter(network, AdapterSettings(rank=4, alpha=8), seed=3)
    randomize_adapter(model)
    return model.train()


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 40, (24,), generator=generator).tolist()
    ids = [torch.randint(0, 211, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [[-100] * (len(each) // 3) + each[len(each) // 3 :] for each in ids]}
    )


def with_trainer(model, folder):
    tokenizer = tiny_tokenizer(None)
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **OPTIONS),
        train_dataset=rows(),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
    )


def with_sft_trainer(model, folder, **options):
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder), max_length=None, bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True}, **OPTIONS, **{"gradient_checkpointing": False, **options},
    )  # fmt: skip
    return SFTTrainer(model, args=settings, train_dataset=rows(), processing_class=tiny_tokenizer(None))


TRAINERS = {
    "Trainer": with_trainer,
    "SFTTrainer": with_sft_trainer,
    "SFTTrainer, checkpointing": lambda *a: with_sft_trainer(*a, gradient_checkpointing=True),
    "SFTTrainer, padding-free": lambda *a: with_sft_trainer(*a, padding_free=True),
}


def train(model, trainer, folder):
    """Return each update's loss, the trained weights, and their start."""
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    made = TRAINERS[trainer](model, folder)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, {name: p.detach() - start[name] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_lean_model_follows_the_stock_model(tmp_path, family, trainer):
    # Padding-free rows are one line to transformers' CPU attention, which sees the neighbour: padded is the oracle.
    oracle = "SFTTrainer" if "padding-free" in trainer else trainer
    wanted_losses, wanted = train(adapted(family), oracle, tmp_path / "stock")
    losses, found = train(make_lean(adapted(family), placement="streamed", tile_tokens=16), trainer, tmp_path / "lean")
    assert len(losses) == UPDATES
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for name, change in wanted.items():
        assert float((found[name] - change).norm()) <= 1e-3 * float(change.norm()), name


def test_planted_sequences_of_a_batch_that_see_each_other_are_seen(monkeypatch, tmp_path):
    wanted_losses, _ = train(adapted(), "Trainer", tmp_path / "stock")
    real = drop_in._paths

    def one_path(*arguments):
        paths, depths_T, positions = real(*arguments)
        return (Path(0, paths[-1].stop),), depths_T, positions

    monkeypatch.setattr(drop_in, "_paths", one_path)
    losses, _ = train(make_lean(adapted()), "Trainer", tmp_path / "lean")
    assert losses != pytest.approx(wanted_losses, rel=1e-3)


def test_left_padding_and_the_mean_loss_are_right():
    stock, lean = adapted(), make_lean(adapted(), tile_tokens=16)
    ids = torch.randint(0, 211, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    labels = ids.masked_fill(mask.cumsum(1) <= 1, -100)  # the first token has no parent; stock would read padding
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = stock(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels).loss
    found = lean(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)


def test_without_labels_the_logits_are_those_of_the_stock_model():
    stock, lean = adapted("qwen2"), make_lean(adapted("qwen2"), tile_tokens=16)
    ids = torch.randint(0, 211, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(lean(input_ids=ids).logits, stock(input_ids=ids).logits, atol=2e-5)


def test_the_adapter_is_saved_as_ever(tmp_path):
    from safetensors.torch import load_file

    model = make_lean(adapted(), placement="streamed")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 2 * 7 * 2
    assert all(each.numel() for each in saved.values())


def test_what_it_cannot_do_is_refused_by_name():
    ids = torch.zeros(1, 4, dtype=torch.long)
    model = make_lean(adapted())
    for given, said in (
        ({"inputs_embeds": torch.zeros(1, 4, 48), "input_ids": None}, "inputs_embeds"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "4 dimensions"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "hole"),
        ({"output_hidden_states": True}, "output_hidden_states"),
    ):
        with pytest.raises(ModelError, match=said):
            model.get_base_model().base_model(**{"input_ids": ids, **given})


def test_a_second_forward_before_the_backward_is_refused_by_name():
    model = make_lean(adapted())
    ids = torch.arange(6)[None]
    first = model(input_ids=ids, labels=ids).loss
    model(input_ids=ids, labels=ids)
    with pytest.raises(TrainingError, match="one row at a time"):
        first.backward()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "output layer is a"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding is a"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "DoRA"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "LoRA bias"),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.1}, "dropout"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "output layer is a"),
    ],
    ids=str,
)
@pytest.mark.parametrize("trained", [True, False])
def test_adapters_without_a_lean_path_are_refused_by_name_whether_trained_or_not(given, said, trained):
    model = get_peft_model(tiny_network("llama"), LoraConfig(r=4, task_type="CAUSAL_LM", **given))
    if not trained:
        model.requires_grad_(False)
    with pytest.raises(ModelError, match=said):
        make_lean(model)


def test_all_linears_and_scaled_ranks_are_admitted():
    for given in ({"target_modules": "all-linear"}, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}):
        settings = LoraConfig(r=4, lora_alpha=3, task_type="CAUSAL_LM", **given)
        stock, lean = (get_peft_model(tiny_network("llama"), settings) for _ in range(2))
        for each in (stock, lean):
            randomize_adapter(each)
        ids = torch.randint(0, 211, (1, 30), generator=torch.Generator().manual_seed(1))
        for each in (stock, make_lean(lean, tile_tokens=16)):
            each(input_ids=ids, labels=ids).loss.backward()
        wanted = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}
        found = {name: p.grad for name, p in lean.named_parameters() if p.requires_grad}
        assert found.keys() == wanted.keys()
        assert all(float((found[name] - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"hidden_act": "gelu"}, "gelu"), ({"sliding_window": 8}, "sliding"), ({"attention_dropout": 0.1}, "dropout")],
)
def test_models_without_a_lean_path_are_refused_by_name(changes, said):
    family = "mistral" if "sliding_window" in changes else "llama"
    with pytest.raises(ModelError, match=said):
        make_lean(adapted(family, **changes))
