"""What every other package may use: errors, random draws, trees of tensors, files, extras."""
