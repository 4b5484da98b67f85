"""Any nn.Module as the body of a network: run as a pure function of named parameters."""
