"""Data sets by name: found in a folder or in the cache, made from official files, or downloaded."""
