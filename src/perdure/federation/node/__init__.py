"""The nodes' side of a federation: what a node accepts, trains and sends."""
