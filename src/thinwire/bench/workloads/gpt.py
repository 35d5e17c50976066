"""A byte-level GPT trained on the source text of the running interpreter's standard library."""

import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from thinwire.bench.workloads.base import Workload

VOCABULARY = 256
CONTEXT = 128
WIDTH = 256
HEADS = 8
LAYERS = 6
BATCH = 4
VALIDATION_WINDOWS = 64


class Block(nn.Module):
    """Pre-norm attention and feed-forward, both with a residual path."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Decoder-only transformer with learned positions, torch's own initialisation and 4.9 M parameters."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS, context: int = CONTEXT):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch, time] to logits [batch, time, 256]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def standard_library_text() -> bytes:
    """Source of the standard library: every ``*.py`` in sorted order, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return b"".join(path.read_bytes() for path in paths)


class GptWorkload(Workload):
    """Next-byte prediction: batches of 4 windows of 128 bytes per rank, the last 5 % held out."""

    learning_rates: Mapping[str, float] = {"adamw": 1e-3, "sgd": 0.1, "nag": 0.1, "lans": 0.01, "lamb": 0.01}

    def __init__(self, rank: int, world_size: int):
        text = torch.frombuffer(bytearray(standard_library_text()), dtype=torch.uint8)
        held_out = len(text) // 20
        self.train, self.held_out = text[:-held_out], text[-held_out:]
        self.rank = rank
        windows = torch.linspace(0, held_out - CONTEXT - 1, VALIDATION_WINDOWS).long()
        self.windows = windows[rank::world_size]
        self.generator = torch.Generator()

    def model(self, seed: int) -> nn.Module:
        """A fresh ``Gpt``."""
        torch.manual_seed(seed)
        return Gpt()

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        """The blocks."""
        assert isinstance(model, Gpt)
        return model.blocks

    def start(self, seed: int) -> None:
        """Reseed the choice of windows: other ranks and other seeds see other text."""
        self.generator.manual_seed(seed * 1_000_003 + self.rank)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Mean cross-entropy in nats per byte."""
        starts = torch.randint(len(self.train) - CONTEXT - 1, (BATCH,), generator=self.generator)
        tokens = _gather(self.train, starts)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> tuple[float, float, int]:
        """Cross-entropy and hits of the next byte on this rank's share of 64 fixed windows."""
        loss, correct, answers = 0.0, 0.0, 0
        with torch.no_grad():
            for starts in self.windows.split(8):
                tokens = _gather(self.held_out, starts)
                logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
                loss += F.cross_entropy(logits, targets, reduction="sum").item()
                correct += (logits.argmax(1) == targets).sum().item()
                answers += targets.numel()
        return loss, correct, answers

    def facts(self) -> Mapping[str, object]:
        """Where the text comes from and how much there is."""
        return {
            "model": f"byte-level GPT, {LAYERS} layers, width {WIDTH}, context {CONTEXT}",
            "data": "source text of the Python standard library",
            "data_nbytes": len(self.train) + len(self.held_out),
            "held_out_nbytes": len(self.held_out),
            "validation_windows": VALIDATION_WINDOWS,
            "batch_per_node": BATCH,
            "optimizer": self.describe_optimizer(),
        }


def _gather(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Windows of CONTEXT + 1 bytes: inputs and, one further, targets."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
