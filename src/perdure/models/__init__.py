"""Models as pure functions of named parameters: bodies, heads and their layers."""

from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network, make_network
from perdure.models.outputs import Outputs

__all__ = ["ForwardPass", "Network", "Outputs", "make_network"]
