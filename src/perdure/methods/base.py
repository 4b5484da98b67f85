"""The home of the contract of perdure 0.1, which is gone."""

raise ImportError(
    "perdure.methods.base is gone since 0.2: import Method, Train, Exchange and the others from "
    "perdure; docs/upgrade.md has the table of old and new names"
)
