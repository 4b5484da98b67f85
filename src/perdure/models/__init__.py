"""Models as pure functions over named parameters: bodies, heads and the layers they are made of."""

from perdure.models.heads import Outputs
from perdure.models.network import Network, make_network
from perdure.models.passes import Pass

__all__ = ["Network", "Outputs", "Pass", "make_network"]
