"""Models as pure functions of named parameters: bodies, heads and their layers."""

from perdure.models.network import Network, Outputs, make_network
from perdure.models.ops import ForwardPass

__all__ = ["ForwardPass", "Network", "Outputs", "make_network"]
