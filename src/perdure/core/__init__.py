"""The lowest layer, which every package may import: errors, randomness, trees of tensors, files."""
