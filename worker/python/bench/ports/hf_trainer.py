"""Classifies sentences with BERT, in the style of transformers' examples of the Trainer."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def sentences(count, seed):
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(6, 20, (), generator=random))
        words = torch.randint(2, 40, (length,), generator=random)
        label = int(torch.randint(2, (), generator=random))
        # The word 0 or 1 stands somewhere.
        words[int(torch.randint(length, (), generator=random))] = label
        rows.append({"input_ids": words.tolist(), "label": label})
    return rows


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    rest = [width - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor([row["input_ids"] + [40] * n for row, n in zip(rows, rest)]),
        "attention_mask": torch.tensor([[1] * (width - n) + [0] * n for n in rest]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


torch.manual_seed(1)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=41,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        pad_token_id=40,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        num_train_epochs=4,
        learning_rate=3e-3,
        warmup_steps=20,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    ),
    data_collator=collate,
    train_dataset=sentences(1600, 1),
    eval_dataset=sentences(400, 2),
    compute_metrics=accuracy,
)
trainer.train()
metrics = trainer.evaluate()
print("accuracy", metrics["eval_accuracy"])
