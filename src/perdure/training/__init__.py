"""The loop, typed messages, aggregation, client sampling and the byte ledger."""
