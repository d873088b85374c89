"""Where the time of the training loop went: the ring of stamps, the ledger, and counts by tick."""
