"""The lines of the log: their records, who writes them and who reads them."""
