"""VGG16 for 224 x 224 images and 1,000 classes (Simonyan and Zisserman 2015, configuration D)."""

from thinwire.shapes.layer import Layer, conv, linear

# (output channels, output size in pixels); the size halves at each of the five max-poolings.
_CONVS = [(64, 224)] * 2 + [(128, 112)] * 2 + [(256, 56)] * 3 + [(512, 28)] * 3 + [(512, 14)] * 3


def vgg16(scale: int = 1) -> list[Layer]:
    """Layers in forward order; 138,357,544 parameters at scale 1."""
    layers: list[Layer] = []
    inputs = 3
    for index, (channels, size) in enumerate(_CONVS):
        layers.append(conv(f"features.{index}", inputs, channels // scale, 3, size, bias=True))
        inputs = channels // scale
    layers.append(linear("classifier.0", inputs * 7 * 7, 4096 // scale))
    layers.append(linear("classifier.1", 4096 // scale, 4096 // scale))
    layers.append(linear("classifier.2", 4096 // scale, 1000))
    return layers
