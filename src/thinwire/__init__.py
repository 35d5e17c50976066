"""thinwire: PyTorch training that sends less over slow networks."""

__version__ = "0.1.0"
