"""Where the time of the training loop went: the ledger, the evaluations, and counts by tick."""
