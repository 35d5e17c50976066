"""LANS, LAMB and Nesterov's SGD in NumPy and float64, as their equations are written, one block at a time."""

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


def norm(v: Array) -> float:
    return float(np.sqrt(np.sum(v * v)))


def ratio(above: float, below: float) -> float:
    return above / below if above != 0 and below != 0 else 1.0


@dataclass
class Lans:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    normalize_grad: bool = True
    grad_averaging: bool = True
    bias_correction: bool = True
    decoupled_weight_decay: bool = True
    t: int = 0
    moments: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def step(self, weights: dict[str, Array], grads: dict[str, Array]) -> None:
        self.t += 1
        b1, b2 = self.betas
        b3 = 1 - b1 if self.grad_averaging else 1.0
        for name, g in grads.items():
            x = weights[name]
            if self.normalize_grad and norm(g) != 0:
                g = g / (norm(g) + self.eps)
            if not self.decoupled_weight_decay:
                g = g + self.weight_decay * x
            m, v = self.moments.get(name, (np.zeros_like(x), np.zeros_like(x)))
            m = b1 * m + b3 * g
            v = b2 * v + (1 - b2) * g * g
            self.moments[name] = (m, v)
            mh = m / (1 - b1**self.t) if self.bias_correction else m
            vh = v / (1 - b2**self.t) if self.bias_correction else v
            decay = self.weight_decay * x if self.decoupled_weight_decay else 0.0
            r = mh / (np.sqrt(vh) + self.eps) + decay
            c = g / (np.sqrt(vh) + self.eps) + decay
            toward_r = ratio(norm(x), norm(r)) * r
            toward_c = ratio(norm(x), norm(c)) * c
            weights[name] = x - self.lr * (b1 * toward_r + b3 * toward_c)


@dataclass
class Lamb:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    adapt_all: bool = False
    grad_averaging: bool = True
    bias_correction: bool = True
    decoupled_weight_decay: bool = True
    t: int = 0
    moments: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def step(self, weights: dict[str, Array], grads: dict[str, Array]) -> None:
        self.t += 1
        b1, b2 = self.betas
        b3 = 1 - b1 if self.grad_averaging else 1.0
        whole = norm(np.concatenate([g.ravel() for g in grads.values()]))
        for name, g in grads.items():
            x = weights[name]
            if self.max_grad_norm is not None and whole > self.max_grad_norm:
                g = g / (whole / self.max_grad_norm)
            if not self.decoupled_weight_decay:
                g = g + self.weight_decay * x
            m, v = self.moments.get(name, (np.zeros_like(x), np.zeros_like(x)))
            m = b1 * m + b3 * g
            v = b2 * v + (1 - b2) * g * g
            self.moments[name] = (m, v)
            mh = m / (1 - b1**self.t) if self.bias_correction else m
            vh = v / (1 - b2**self.t) if self.bias_correction else v
            u = mh / (np.sqrt(vh) + self.eps) + (self.weight_decay * x if self.decoupled_weight_decay else 0.0)
            adapted = self.weight_decay != 0 or self.adapt_all
            weights[name] = x - self.lr * (ratio(norm(x), norm(u)) if adapted else 1.0) * u


@dataclass
class Nag:
    lr: float
    momentum: float
    weight_decay: float = 0.0
    buffers: dict[str, Array] = field(default_factory=dict)

    def step(self, weights: dict[str, Array], grads: dict[str, Array]) -> None:
        for name, g in grads.items():
            d = g + self.weight_decay * weights[name]
            self.buffers[name] = self.momentum * self.buffers.get(name, np.zeros_like(g)) + d
            weights[name] = weights[name] - self.lr * (d + self.momentum * self.buffers[name])
