"""BERT encoder with pooler, uncased English vocabulary (Devlin et al. 2019), sequences of 128 tokens."""

from thinwire.shapes.layer import Layer, linear, norm

VOCABULARY = 30522
POSITIONS = 512
SEGMENTS = 2
SEQUENCE = 128


def bert(*, num_layers: int, width: int, scale: int = 1) -> list[Layer]:
    """Layers in forward order; 109,482,240 parameters for the base model, 335,141,888 for the large one."""
    width //= scale
    tables = (("word", VOCABULARY), ("position", POSITIONS), ("segment", SEGMENTS))
    layers = [Layer("embeddings", tuple((f"embeddings.{name}", (rows, width)) for name, rows in tables), 0.0)]
    layers.append(norm("embeddings.norm", width))
    for index in range(num_layers):
        layers += _encoder(f"encoder.{index}", width)
    layers.append(linear("pooler", width, width))
    return layers


def _encoder(name: str, width: int) -> list[Layer]:
    layers = [linear(f"{name}.{part}", width, width, SEQUENCE) for part in ("query", "key", "value", "output")]
    layers.append(norm(f"{name}.attention_norm", width))
    layers.append(linear(f"{name}.up", width, 4 * width, SEQUENCE))
    layers.append(linear(f"{name}.down", 4 * width, width, SEQUENCE))
    layers.append(norm(f"{name}.norm", width))
    return layers
