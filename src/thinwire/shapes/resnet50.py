"""ResNet-50 and ResNet-101 for 224 x 224 images and 1,000 classes (He et al. 2016; stride in the 3 x 3 convolution)."""

from thinwire.shapes.layer import Layer, conv, linear, norm

# (width inside the bottleneck, output size in pixels) of the four stages.
_STAGES = [(64, 56), (128, 28), (256, 14), (512, 7)]
_EXPANSION = 4


def resnet50(scale: int = 1) -> list[Layer]:
    """Layers in forward order; 25,557,032 parameters at scale 1."""
    return _resnet((3, 4, 6, 3), scale)


def resnet101(scale: int = 1) -> list[Layer]:
    """Layers in forward order; 44,549,160 parameters at scale 1."""
    return _resnet((3, 4, 23, 3), scale)


def _resnet(blocks: tuple[int, ...], scale: int) -> list[Layer]:
    layers = _conv_norm("stem", 3, 64 // scale, 7, 112)
    inputs = 64 // scale
    for stage, (num_blocks, (width, size)) in enumerate(zip(blocks, _STAGES, strict=True), start=1):
        for block in range(num_blocks):
            layers += _bottleneck(f"layer{stage}.{block}", inputs, width // scale, size, first=block == 0, stage=stage)
            inputs = width // scale * _EXPANSION
    layers.append(linear("fc", inputs, 1000))
    return layers


def _bottleneck(name: str, inputs: int, width: int, size: int, *, first: bool, stage: int) -> list[Layer]:
    outputs = width * _EXPANSION
    # The first block of stages 2 to 4 halves the image in its second convolution, so its first one sees the larger.
    size_in = size * 2 if first and stage > 1 else size
    layers = _conv_norm(f"{name}.1", inputs, width, 1, size_in)
    layers += _conv_norm(f"{name}.2", width, width, 3, size)
    layers += _conv_norm(f"{name}.3", width, outputs, 1, size)
    if first:
        layers += _conv_norm(f"{name}.shortcut", inputs, outputs, 1, size)
    return layers


def _conv_norm(name: str, inputs: int, outputs: int, kernel: int, size: int) -> list[Layer]:
    return [conv(f"{name}.conv", inputs, outputs, kernel, size, bias=False), norm(f"{name}.norm", outputs)]
