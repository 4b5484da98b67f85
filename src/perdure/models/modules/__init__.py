"""Networks as plain modules.

Those with a config section of their own (mlp, conv, alexnet, the residual networks) have no head;
`MODULES` in perdure.config.model names others.
"""
