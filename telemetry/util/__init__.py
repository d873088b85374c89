"""Tools that know nothing of training."""
