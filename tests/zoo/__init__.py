"""Training scripts with one known cause of a stall each, and healthy ones. The zoo judges the reports on them."""
