"""Where thinwire plugs into PyTorch's own data-parallel tools."""
