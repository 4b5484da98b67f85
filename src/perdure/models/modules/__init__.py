"""Networks that are plain modules; `MODULES` in perdure.config.model names them."""
