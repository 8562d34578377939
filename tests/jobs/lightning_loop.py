"""Lightning on two ranks of one machine: python lightning_loop.py"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(1024, 64), torch.randn(1024, 8)), batch_size=16)
    trainer = lightning.Trainer(
        max_steps=24, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
