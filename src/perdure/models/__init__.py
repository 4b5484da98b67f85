"""Models as pure functions over named parameters: bodies, heads and the layers they are made of."""

from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network, make_network
from perdure.models.outputs import Outputs

__all__ = ["ForwardPass", "Network", "Outputs", "make_network"]
