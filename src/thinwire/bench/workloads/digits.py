"""A small ResNet on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: learns in seconds, on real data."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.bench.workloads.base import Workload
from thinwire.errors import ThinwireError

WIDTHS = (32, 64, 128)
BATCH = 16
HELD_OUT = 360


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut.

    Group norm, not batch norm: it keeps no running averages, which would differ between ranks.
    """

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, inputs, h, w] to [batch, outputs, h / stride, w / stride]."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


def resnet() -> nn.Sequential:
    """Stem, three residual blocks, mean over the pixels, ten classes."""
    blocks, inputs = [], WIDTHS[0]
    for index, width in enumerate(WIDTHS):
        blocks.append(ResidualBlock(inputs, width, stride=1 if index == 0 else 2))
        inputs = width
    stem = nn.Conv2d(1, WIDTHS[0], 3, padding=1)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class DigitsWorkload(Workload):
    """Classify digits: batches of 16 per rank, 360 images held out."""

    learning_rates: Mapping[str, float] = {"adamw": 2e-3, "sgd": 0.05, "nag": 0.05, "lans": 0.01, "lamb": 0.01}

    def __init__(self, rank: int, world_size: int):
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise ThinwireError("the digits workload needs scikit-learn: pip install '.[demo]'") from error
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.images = (torch.from_numpy(images).float() / 16)[order].view(-1, 1, 8, 8)
        self.labels = torch.from_numpy(labels).long()[order]
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator()

    def model(self, seed: int) -> nn.Module:
        """A fresh ``resnet``."""
        torch.manual_seed(seed)
        return resnet()

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        """The residual blocks."""
        return [layer for layer in model.children() if isinstance(layer, ResidualBlock)]

    def start(self, seed: int) -> None:
        """Reseed the choice of images: other ranks and other seeds see other ones."""
        self.generator.manual_seed(seed * 1_000_003 + self.rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Mean cross-entropy."""
        chosen = torch.randint(HELD_OUT, len(self.labels), (BATCH,), generator=self.generator)
        return F.cross_entropy(model(self.images[chosen]), self.labels[chosen])

    def evaluate(self, model: nn.Module) -> tuple[float, float, int]:
        """Cross-entropy and hits on this rank's share of the held-out images."""
        mine = torch.arange(self.rank, HELD_OUT, self.world_size)
        with torch.no_grad():
            logits, labels = model(self.images[mine]), self.labels[mine]
        loss = F.cross_entropy(logits, labels, reduction="sum").item()
        return loss, (logits.argmax(1) == labels).sum().item(), len(mine)

    def facts(self) -> Mapping[str, object]:
        """Where the images come from and how many there are."""
        return {
            "model": f"ResNet with widths {', '.join(map(str, WIDTHS))} and group norm",
            "data": "scikit-learn's handwritten digits",
            "data_images": len(self.labels),
            "held_out_images": HELD_OUT,
            "batch_per_node": BATCH,
            "optimizer": self.describe_optimizer(),
        }
