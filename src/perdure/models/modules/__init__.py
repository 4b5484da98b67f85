"""Networks as plain modules.

Those without a head have a config section (mlp); `MODULES` in perdure.config.model names others.
"""
