"""Many runs under one protocol: every method, setting and seed, side by side."""
