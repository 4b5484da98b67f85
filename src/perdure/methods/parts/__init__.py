"""Parts that methods are put together from."""
