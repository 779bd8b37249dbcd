"""A program with the trainer of another package, for the tests of whole jobs.

Arguments: the package; a folder; "alone" to train with the package and then without a job, and to
try what is refused, or else a file, to which the program adds a line. A line is what a training has
led to: the digest of the parameters, and the accuracy. In a job, two workers are killed.
"""

import os
import pathlib
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

RECORDS, EPOCHS, BATCH = 209, 3, 16
random = torch.Generator().manual_seed(1)
X = torch.randn(RECORDS, 8, generator=random)
Y = (X @ torch.randn(8, 3, generator=random)).argmax(1)
TESTED = TensorDataset(X[:50], Y[:50])


# Epochs and records at which the worker that reads them is killed: the next one joins within the
# epoch, and the other one for its last step, which has one record, of another worker.
KILLS = {(1, 48), (1, RECORDS - 1)}


class Data(torch.utils.data.Dataset):
    """A data set, which ends the workers of a job."""

    def __init__(self, killed=None):
        """``killed``: a path that names of files begin with, one for each kill."""
        self._killed = killed

    def __len__(self):
        return RECORDS

    def __iter__(self):
        return (self[index] for index in range(RECORDS))

    def __getitem__(self, index):
        if self._killed and (index.epoch, index) in KILLS:
            mark = pathlib.Path(f"{self._killed}-{index}")
            if not mark.exists():
                mark.touch()
                is_loader = torch.utils.data.get_worker_info() is not None
                os.kill(os.getppid() if is_loader else os.getpid(), signal.SIGKILL)
        return X[index], Y[index]


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def accuracy(scores, labels):
    return (scores.argmax(1) == labels).double().mean().item()


# ---- a program for each package ----


def run_accelerate(folder, data, micro, is_plain):
    if is_plain:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCH // micro)
    else:
        from elasticdl.integrations.accelerate import Accelerator

        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=BATCH // micro, epochs=EPOCHS, clip_norm=1.0
        )
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    model, optimizer, loader, test, scheduler = accelerator.prepare(
        net, optimizer, DataLoader(data, batch_size=micro), DataLoader(TESTED, 16), scheduler
    )
    for _ in range(EPOCHS) if is_plain else accelerator.epochs():
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            parts = [accelerator.gather_for_metrics((model(x), y)) for x, y in test]
    accelerator.save_model(model, folder)
    return net, accuracy(*map(torch.cat, zip(*parts, strict=True)))


def run_lightning(folder, data, micro, is_plain):
    import lightning

    if is_plain:
        from lightning import Trainer
    else:
        from elasticdl.integrations.lightning import Trainer

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()
            self.tested = []

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("accuracy", accuracy(self.net(batch[0]), batch[1]))

        def on_validation_end(self):
            self.tested.append((self.trainer.current_epoch, self.trainer.global_step))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            by_step = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)
            return [optimizer], [
                {"scheduler": by_step, "interval": "step"},
                torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            ]

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=BATCH // micro,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=micro), DataLoader(TESTED, batch_size=16))
    trainer.save_checkpoint(pathlib.Path(folder, "model.ckpt"))
    steps = -(-RECORDS // BATCH)
    assert trainer.global_step == EPOCHS * steps, trainer.global_step
    expected = [(epoch, (epoch + 1) * steps) for epoch in range(EPOCHS)]
    assert module.tested == expected[-len(module.tested) :], module.tested
    return module.net, float(trainer.callback_metrics["accuracy"])


def run_transformers(folder, data, micro, is_plain):
    from transformers import TrainingArguments

    if is_plain:
        from transformers import Trainer
    else:
        from elasticdl.integrations.transformers import Trainer

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, labels=None, num_items_in_batch=None, **_):
            scores = self.net(x)
            # A mean over tokens, as of a language model; some records have none.
            of_each = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
            return {"loss": of_each.sum() / (num_items_in_batch or len(labels)), "logits": scores}

    def collate(rows):
        x, y = zip(*rows, strict=True)
        labels = torch.stack(y)
        return {"x": torch.stack(x), "labels": torch.where(torch.stack(x)[:, 0] > 1, -100, labels)}

    model = Classifier()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=BATCH // micro,
            num_train_epochs=EPOCHS,
            learning_rate=1e-2,
            warmup_steps=5,
            train_sampling_strategy="sequential",
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=10,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_num_workers=1,
            dataloader_pin_memory=False,
            report_to=[],
        ),
        train_dataset=data,
        eval_dataset=TESTED,
        data_collator=collate,
        compute_metrics=lambda found: {
            "accuracy": accuracy(torch.tensor(found.predictions), torch.tensor(found.label_ids))
        },
    )
    steps = EPOCHS * -(-RECORDS // BATCH)
    assert trainer.train().global_step == steps
    assert (trainer.state.global_step, trainer.state.epoch) == (steps, EPOCHS), trainer.state
    trainer.save_model()
    return model.net, trainer.evaluate()["eval_accuracy"]


# ---- what is refused, and what the error says ----


def refused_accelerate(folder, data):
    from elasticdl.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loaders = [DataLoader(data, batch_size=8, **options) for options in ({}, {"shuffle": True})]
    accelerator.prepare(loaders[0])
    net = make_net()
    return (
        (lambda: Accelerator(cpu=True).prepare(DataLoader(data, 8, drop_last=True)), "drop_last"),
        (lambda: accelerator.prepare(loaders[1]), "without shuffle"),
        (lambda: accelerator.clip_grad_norm_(net.parameters(), 2.0), "say Accelerator(clip_norm="),
        (lambda: accelerator.load_state(folder), "--resume"),
        (lambda: accelerator.gather(X), "use gather_for_metrics()"),
    )


def refused_lightning(folder, data):
    import lightning

    from elasticdl.integrations.lightning import Trainer

    del folder, data
    manual = lightning.LightningModule()
    manual.automatic_optimization = False
    return (
        (lambda: Trainer(strategy="ddp"), "by elasticdl train"),
        (lambda: Trainer(limit_train_batches=3), "--max-steps"),
        (lambda: Trainer(precision="16-mixed"), "bf16"),
        (lambda: Trainer(accelerator="cpu").fit(manual), "write the loop yourself"),
        (lambda: Trainer(accelerator="cpu").fit(manual, ckpt_path="last"), "--resume"),
    )


def refused_transformers(folder, data):
    from transformers import TrainerCallback, TrainingArguments

    from elasticdl.integrations.transformers import Trainer

    class Stops(TrainerCallback):
        def on_epoch_end(self, args, state, control, **_):
            control.should_training_stop = True

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, y):
            return {"loss": torch.nn.functional.cross_entropy(self.net(x), y)}

    rows = [{"x": x, "y": y} for x, y in data]

    def make(callbacks=(), **options):
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        return Trainer(Classifier(), args, train_dataset=rows, callbacks=list(callbacks))

    return (
        (lambda: make(train_sampling_strategy="group_by_length"), "--shuffle block"),
        (lambda: make(auto_find_batch_size=True), "give per_device_train_batch_size"),
        (lambda: make(save_strategy="best", metric_for_best_model="loss"), "--best-metric"),
        (lambda: make().train(resume_from_checkpoint=True), "--resume"),
        (lambda: make([Stops()]).train(), "the trainer stopped on this worker"),
    )


def check_refused(package, folder, data):
    for act, expected in globals()[f"refused_{package}"](folder, data):
        try:
            act()
        except (RuntimeError, ValueError) as error:
            assert expected in str(error), (expected, error)
            continue
        raise AssertionError(expected)


def main():
    package, folder, path = sys.argv[1:]
    run = globals()[f"run_{package}"]
    if path == "alone":
        data = Data()
        # The plain trainer has a step in one batch: accelerate and Lightning would take a last
        # batch of fewer micro-batches for a smaller gradient.
        print(result(*run(folder, data, BATCH, is_plain=True)))
        print(result(*run(folder, data, BATCH // 2, is_plain=False)))
        check_refused(package, folder, data)
        return
    line = result(*run(folder, Data(killed=path), BATCH // 2, is_plain=False))
    with open(path, "a") as file:
        file.write(f"{line}\n")


def result(net, tested):
    digest = sum(parameter.detach().double().abs().sum().item() for parameter in net.parameters())
    return f"{digest} {tested}"


if __name__ == "__main__":
    main()
