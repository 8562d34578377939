"""Lightning on two ranks of one machine: python lightning_loop.py"""

import lightning
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_model(self):
        if self.device_mesh is not None:  # ModelParallelStrategy leaves it to the model
            for layer in (self.layers[0], self.layers[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(callbacks=(), strategy="ddp"):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(1024, 64), torch.randn(1024, 8)), batch_size=16)
    trainer = lightning.Trainer(
        max_steps=24, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, accumulate_grad_batches=2, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
