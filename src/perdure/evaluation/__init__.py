"""Evaluation: predictions of the global model, the counts behind them, metrics and forgetting."""
